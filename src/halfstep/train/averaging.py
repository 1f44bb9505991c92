"""Averaged weights: an exponential moving average over applied updates."""

from __future__ import annotations

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """An average of the model's weights, for `Engine(ema=...)`; its first update takes the weights as they are.

    Buffers are not averaged: they are statistics, or masks, and are taken over as they are.

    Args:
        model: on its device.
        decay: what the average keeps of itself in an update, from 0 to 1.
    """
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]  # torch leaves it untyped
