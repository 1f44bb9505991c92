"""Reads what a loss is made of from its autograd graph: divisions, the loss scale, the reduction, the leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from halfstep.events.vocabulary import Divisor, Ref

_SCALED = "halfstep scaler"
"""Key in a graph node's metadata: the scaler that made it."""
MAX_NODES = 20_000
LEAST_SCALE = 8.0
"""A factor of a loss that is at least so large scales it by hand; a smaller one is a weight."""
_PASSING = (
    "Add",
    "Sub",
    "ToCopy",
    "View",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Select",
    "Stack",
    "Sum",
    "Clone",
    "_DDPSink",
    "Neg",
)
_MEANS = ("Mean", "MseLoss", "NllLoss", "L1Loss", "SmoothL1", "HuberLoss", "BinaryCrossEntropy", "KlDiv", "SoftMarginLoss")


@dataclass(slots=True)
class Reading:
    """What one loss is made of."""

    leaves: list[torch.Tensor] = field(default_factory=list)
    divisors: tuple[Divisor, ...] = ()
    scaler: Ref | None = None
    reduction: str | None = None


def read(root: Any, *, look: bool) -> Reading:
    """The graph below a node.

    Args:
        root: the loss's `grad_fn`.
        look: whether numbers that may be on a device are read, which waits for it.
    """
    found = Reading()
    _head(root, found, look)
    found.leaves = list(leaves(root))
    return found


def leaves(root: Any) -> Iterator[torch.Tensor]:
    """The tensors into which a backward pass adds gradients."""
    seen, todo = {root}, [root]
    while todo and len(seen) < MAX_NODES:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                todo.append(node)
                variable = getattr(node, "variable", None)
                if variable is not None:
                    yield variable


def mark(node: Any, scaler: Ref) -> None:
    """Note in a graph node which scaler made it."""
    node.metadata[_SCALED] = scaler


def marked(node: Any) -> Ref | None:
    """The scaler that made a node, if one did."""
    scaler: Ref | None = node.metadata.get(_SCALED) if node.name().startswith("Mul") else None
    return scaler


def _head(root: Any, found: Reading, look: bool) -> None:
    """The nodes from the loss down to the criterion: a chain, with sums of several losses."""
    todo = [root]
    for _ in range(24):
        if not todo:
            return
        node = todo.pop(0)
        name = node.name()
        if name.startswith(("Mul", "Div")):
            _factor(node, name, found, look)
        elif name.startswith(_MEANS):
            found.reduction = found.reduction or _reduction(node, name, look)
            continue
        elif name.startswith("Sum"):
            found.reduction = found.reduction or "sum"
            continue
        elif not name.startswith(_PASSING):
            continue
        todo += [inner for inner, _ in node.next_functions if inner is not None]


def _factor(node: Any, name: str, found: Reading, look: bool) -> None:
    scaler = marked(node)
    if scaler is not None:
        found.scaler = scaler
        return
    value = _scalar(getattr(node, "_saved_other", None), look)
    if value is None and name.startswith("Mul"):
        value = _scalar(getattr(node, "_saved_self", None), look)
    if value is None:
        found.divisors += (Divisor(None),) if name.startswith("Div") else ()
    elif name.startswith("Div") and value not in (0.0, 1.0):
        found.divisors += (Divisor(_whole(value)),)
    elif name.startswith("Mul") and (0.0 < value < 1.0 or value >= LEAST_SCALE):
        found.divisors += (Divisor(_whole(1.0 / value)),)


def _whole(value: float) -> float:
    return float(round(value)) if value >= 1 and abs(value - round(value)) < 1e-4 * value else value


def _scalar(value: Any, look: bool) -> float | None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not (look or value.device.type == "cpu"):
        return None
    return float(value)


def _reduction(node: Any, name: str, look: bool) -> str | None:
    how = getattr(node, "_saved_reduction", 1)
    if how != 1:
        return "sum" if how == 2 else None
    if name.startswith("NllLoss") and node._saved_weight is None:
        counted = _scalar(node._saved_total_weight, look)
        if counted is not None and counted < node._saved_target.numel():
            return "token_mean"
    return "mean"
