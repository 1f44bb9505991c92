"""The loss on held-out data, and the share that is right, weighted by what counts over all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.config.options import Metric
from halfstep.distributed import Group
from halfstep.distributed.shards import in_step, is_sharded
from halfstep.engine.batch import to_device
from halfstep.engine.reading import read_ahead

Look = Callable[[nn.Module, Any], tuple[Tensor, ...]]
"""From a model and a batch to the summed loss, what it was summed over and, where that is asked, how much of it is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The held-out data of this rank, and how they are looked at.

    Attributes:
        batches: this rank's share of them.
        bytes_per_token: bytes of text for each token that is predicted; `None` where there is no text, or not all is predicted.
        look: what a batch comes to.
        metric: what says which model is the best.
        device: where the model is.
        autocast: the arithmetic of training, as a context.
        group: all ranks.
    """

    batches: Iterable[Any]
    bytes_per_token: float | None
    look: Look
    metric: Metric
    device: torch.device
    autocast: Callable[[], AbstractContextManager[object]]
    group: Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a look found: the mean loss, the share that is right where it was counted, and how long it took."""

    loss: float
    accuracy: float | None
    seconds: float


def evaluate(model: nn.Module, held_out: HeldOut) -> Judgement:
    """The weighted means of `model` on the held-out data; every rank must call it.

    The model is left in training mode.
    """
    began = time.perf_counter()
    held_out.group.broadcast_buffers(model)
    model.eval()
    try:
        total, count, right = _sums(model, held_out)
    finally:
        model.train()
    loss, accuracy = held_out.group.mean(total, count), held_out.group.mean(right, count)
    return Judgement(
        loss=loss,
        accuracy=None if math.isnan(accuracy) else accuracy,
        seconds=time.perf_counter() - began,
    )


@torch.no_grad()
def _sums(model: nn.Module, held_out: HeldOut) -> list[float]:
    """The sums of loss, of what counts, and of what of it is right: NaN where nobody counts that."""
    sums = torch.zeros(3, dtype=torch.float64, device=held_out.device)
    with held_out.autocast():
        for batch, counts in _in_step(model, held_out):
            total, count, *right = held_out.look(model, to_device(batch, held_out.device))
            if not counts:
                continue
            sums += torch.stack([value.double() for value in (total, count, *(right or [torch.full_like(total, math.nan)]))])
    return sums.tolist()


def _in_step(model: nn.Module, held_out: HeldOut) -> Iterator[tuple[Any, bool]]:
    """The batches, with whether they count: of a sharded model every rank looks at as many as the others."""
    if not is_sharded(model):
        yield from ((batch, True) for batch in held_out.batches)
        return
    for batch, counts, _ in in_step(read_ahead(held_out.batches), held_out.group, everyone=False):
        yield batch, counts
