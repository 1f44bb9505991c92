"""Averaged weights: an exponential moving average over applied updates."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

Tensors = tuple[Tensor, ...] | list[Tensor]


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """An average of the model's weights, for `Engine(ema=...)`; its first update takes the weights as they are.

    Buffers are not averaged: they are statistics, or masks, and are taken over as they are.

    The average stays FP32 where the engine turns the model's own weights into BF16: a BF16 average would lose its small steps.

    Args:
        model: on its device.
        decay: what the average keeps of itself in an update, from 0 to 1.
    """
    in_one_format = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def update(average: Tensors, present: Tensors, num_averaged: Tensor | int) -> None:
        in_one_format(average, [new.to(old.dtype) for old, new in zip(average, present, strict=True)], num_averaged)

    return AveragedModel(model, multi_avg_fn=update)
