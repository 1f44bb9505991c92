"""What makes a model's result depend on how its samples are divided: dropout and batch statistics. Switched off, and said."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from halfstep.certify.subject import Parts, seed_all
from halfstep.engine.batch import split, to_device


def still(parts: Parts) -> tuple[Parts, list[str]]:
    """The parts with a model whose result does not depend on the division of its samples, and what was done for that."""
    model = copy.deepcopy(parts.model)
    notes = [*_without_dropout(model), *_without_batch_statistics(model)]
    stilled = Parts(model=model, loss=parts.loss, batches=parts.batches)
    if _is_random(stilled):
        model.eval()
        notes.append(
            "The loss still differed from one forward to the next under another seed: the model draws random numbers while "
            "`model.training` is true. Lines that compare numbers were run under `model.eval()`."
            + (" It draws them then, too: lines that do not hold may not hold for that." if _is_random(stilled) else "")
        )
    if notes:
        notes.append(
            f"With them on, the loss of one micro-batch moves by {_difference(parts):.1e} of it, for no fault of any loop."
        )
    return stilled, notes


def _without_dropout(model: nn.Module) -> list[str]:
    dropped = [module for module in model.modules() if isinstance(module, _DropoutNd) and module.p > 0]
    for module in dropped:
        module.eval()
    if not dropped:
        return []
    return [
        f"{len(dropped)} dropout modules draw a mask for each forward, so that no two divisions of a batch have the same. They "
        "were switched off wherever numbers are compared, and are on where a run is resumed."
    ]


def _without_batch_statistics(model: nn.Module) -> list[str]:
    normed = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    tracking = [module for module in normed if module.track_running_stats]
    for module in tracking:
        module.eval()
    notes = []
    if tracking:
        notes.append(
            f"{len(tracking)} batch norms take mean and variance over a micro-batch, so that accumulating small ones is not one "
            "large one in any framework. They used their running statistics wherever numbers are compared. Where that matters to "
            "you: group norm, or frozen statistics."
        )
    if len(tracking) < len(normed):
        notes.append(
            f"{len(normed) - len(tracking)} batch norms keep no running statistics and so take them over a micro-batch always: "
            "other divisions do not hold for that, in any framework. Group norm, or `track_running_stats=True`, is the cure."
        )
    return notes


def _is_random(parts: Parts) -> bool:
    return len({plain_loss(parts, parts.batches[:1], seed) for seed in (1, 2, 3)}) > 1


def _difference(parts: Parts) -> float:
    """Between two seeds, or between one micro-batch and its halves, whichever is more."""
    whole, halves = plain_loss(parts, parts.batches[:1], 1), plain_loss(parts, split(parts.batches[0], 2), 1)
    reseeded = plain_loss(parts, parts.batches[:1], 2)
    return max(abs(whole - halves), abs(whole - reseeded)) / max(abs(whole), torch.finfo(torch.float32).tiny)


def plain_loss(parts: Parts, batches: Sequence[Any], seed: int) -> float:
    """The mean loss of micro-batches without the engine, in the precision that is at hand."""
    model = copy.deepcopy(parts.model)
    device = next(model.parameters()).device
    seed_all(seed)
    with torch.no_grad():
        found = [_sums(parts.loss(model, to_device(batch, device))) for batch in batches]
    return sum(total for total, _ in found) / (sum(weight for _, weight in found) or 1.0)


def _sums(result: Any) -> tuple[float, float]:
    total, weight = result if isinstance(result, tuple) else (result, 1.0)
    return float(total), float(weight)
