"""Averaged weights: an exponential moving average over applied updates, and their use in place of the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from halfstep.config.choice import Choice


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """An average of the model's weights, for `Engine(ema=...)`; its first update takes the weights as they are.

    Buffers are not averaged: they are statistics, or masks, and are taken over as they are.

    Args:
        model: on its device.
        decay: what the average keeps of itself in an update, from 0 to 1.
    """
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]  # torch leaves it untyped


def automatic_decay(planned_updates: int | None) -> Choice[float]:
    """A decay that looks back over about a tenth of the run, at most 0.9999."""
    if planned_updates is None:
        return Choice(value=0.999, reason="the last 1,000 updates, because the length of the run is unknown")
    window = max(10, planned_updates // 10)
    reason = f"about the last {window:,} of {planned_updates:,} updates"
    return Choice(value=min(0.9999, round(1 - 1 / window, 6)), reason=reason)


@contextmanager
@torch.no_grad()
def averaged_weights(model: nn.Module, average: AveragedModel) -> Iterator[None]:
    """Within it, `model` holds the averaged weights; then its own again, bitwise. Before the first update nothing changes."""
    if int(average.n_averaged) == 0:
        yield
        return
    own = [parameter.detach().clone() for parameter in model.parameters()]
    _fill(model, list(average.module.parameters()))
    try:
        yield
    finally:
        _fill(model, own)


@torch.no_grad()
def _fill(model: nn.Module, values: list[torch.Tensor] | list[nn.Parameter]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)
