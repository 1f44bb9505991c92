"""Why an update was not finite, and where it began."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.engine.batch import first_non_finite, tensors, to_device
from halfstep.engine.ledger import Cause
from halfstep.engine.loss import LossFunction, sum_and_weight
from halfstep.precision.policy import Policy, largest_magnitude


def cause_of_skip(
    module: nn.Module, batches: Sequence[Any], *, loss: float, weight: float, scaled: bool, calibrating: bool
) -> tuple[Cause, str]:
    """The cause of a skipped update and where it was found, from most to least certain.

    Args:
        module: the model, with the parameters that the update left alone.
        batches: this rank's micro-batches of the window.
        loss: global mean loss of the window.
        weight: global weight of the window.
        scaled: whether the loss was scaled.
        calibrating: whether no update has been applied yet.
    """
    if weight == 0:
        return Cause.NO_WEIGHT, "every label of the window is masked"
    for number, batch in enumerate(batches, 1):
        if found := first_non_finite(batch):
            return Cause.DATA, f"{found} of micro-batch {number}"
    name, largest = largest_magnitude(module.named_parameters())
    if not math.isfinite(largest):
        return Cause.WEIGHTS, f"`{name}`"
    if not math.isfinite(loss):
        return Cause.LOSS, f"the loss is {loss}"
    return (Cause.CALIBRATION if scaled and calibrating else Cause.OVERFLOW), ""


def first_non_finite_module(
    module: nn.Module, loss: LossFunction, batch: Any, policy: Policy, *, scale: float, device: torch.device
) -> str | None:
    """Which module first made a value that is not finite; found by running the batch once more, under hooks.

    `.grad` of the parameters is not touched.
    """
    seen: list[str] = []
    with ExitStack() as hooks:
        for name, child in module.named_modules():
            if not any(True for _ in child.children()):
                hooks.callback(child.register_forward_hook(_watcher(name, seen)).remove)
        with policy.autocast():
            total, _ = sum_and_weight(loss(module, to_device(batch, device)))
        if not seen and math.isfinite(total.item()):
            trained = [p for p in module.parameters() if p.requires_grad]
            torch.autograd.grad(total * scale, trained, allow_unused=True)
    if seen:
        return seen[0]
    return None if math.isfinite(total.item()) else "in the loss"


def _watcher(name: str, seen: list[str]) -> Any:
    def hook(child: nn.Module, _args: Any, output: Any) -> None:
        kind = f"`{name or 'the model'}` ({type(child).__name__})"
        for _, tensor in tensors(output):
            if not tensor.is_floating_point():
                continue
            if not bool(torch.isfinite(tensor).all()):
                seen.append(f"in the forward of {kind}")
            elif tensor.requires_grad:
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    _backward_watcher(f"in the backward of {kind}", seen)
                )

    return hook


def _backward_watcher(where: str, seen: list[str]) -> Any:
    def hook(gradient: torch.Tensor) -> None:
        if not bool(torch.isfinite(gradient).all()):
            seen.append(where)

    return hook


def save_evidence(folder: Path, name: str, content: dict[str, Any]) -> str:
    """Save what is needed to run a bad update again; where it was saved, or why it could not be, in words."""
    path = folder / f"{name}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
    except (OSError, RuntimeError) as error:
        return f"the batch could not be saved ({error})"
    return f"the batch was saved as {path}"
