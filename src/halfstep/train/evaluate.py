"""The loss on held-out text, weighted by tokens over all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep.distributed import Group
from halfstep.train.head import CausalLoss

Batches = Iterable[Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The held-out text of this rank, and how it becomes a loss.

    Attributes:
        batches: this rank's share of it.
        num_tokens: tokens that are predicted, over all ranks.
        num_bytes: bytes of their text.
        loss: the summed loss of a batch and how many tokens counted.
        device: where the model is.
        autocast: the arithmetic of training, as a context.
        group: all ranks.
    """

    batches: Batches
    num_tokens: int
    num_bytes: int
    loss: CausalLoss
    device: torch.device
    autocast: Callable[[], AbstractContextManager[object]]
    group: Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the held-out text costs: nats per token and per byte, and how long it took to find out."""

    loss: float
    nats_per_byte: float
    seconds: float


def evaluate(model: nn.Module, held_out: HeldOut) -> Judgement:
    """The weighted mean loss of `model` on the held-out text; every rank must call it.

    The model is left in training mode.
    """
    began = time.perf_counter()
    held_out.group.broadcast_buffers(model)
    model.eval()
    try:
        total, count = _sum(model, held_out)
    finally:
        model.train()
    loss = held_out.group.mean(total, count)
    return Judgement(
        loss=loss,
        nats_per_byte=loss * held_out.num_tokens / held_out.num_bytes,
        seconds=time.perf_counter() - began,
    )


@torch.no_grad()
def _sum(model: nn.Module, held_out: HeldOut) -> tuple[float, float]:
    total = torch.zeros((), dtype=torch.float64, device=held_out.device)
    count = torch.zeros((), dtype=torch.float64, device=held_out.device)
    with held_out.autocast():
        for batch in held_out.batches:
            on_device = {key: value.to(held_out.device, non_blocking=True) for key, value in batch.items()}
            loss, weight = held_out.loss(model, on_device)
            total += loss
            count += weight
    return float(total), float(count)
