"""A training loop that drives a probe by hand, as the recorder does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from halfstep.record.probes.probe import Probe

P = TypeVar("P", bound=Probe)


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).pow(2).mean()


def watched(
    probe: P,
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = squares,
    lr: float = 0.1,
    dtype: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: int = 1,
) -> P:
    """One update a window of `accumulate` batches; sample ids count on from 0."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    probe.attach(model, optimizer, scaler)
    update = first = 0
    for number, (x, y) in enumerate(batches):
        probe.batch_fetched((x, y), list(range(first, first + len(x))))
        first += len(x)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            value = loss(model(x), y) / accumulate
        scaled = scaler.scale(value)
        probe.backward_begins(scaled, None)
        scaled.backward()
        if (number + 1) % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            probe.update_ended(update)
            optimizer.zero_grad()
            update += 1
    probe.detach()
    return probe


def pairs(count: int, width: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, width), torch.randn(8, width)) for _ in range(count)]


def mlp(*middle: nn.Module, width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), *middle, nn.Linear(width, width))
