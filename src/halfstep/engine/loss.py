"""What a loss function may return, and what the engine makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from halfstep.errors import ModelError
from halfstep.precision.policy import HALF_DTYPES

LossResult = torch.Tensor | tuple[torch.Tensor, Any]
"""A scalar (the mean over the micro-batch), or the sum over the micro-batch and its weight (tokens or samples that count)."""

LossFunction = Callable[[nn.Module, Any], LossResult]
"""`loss(model, batch)`: runs the model on one micro-batch."""

_SHAPES = "a loss function returns a scalar tensor, or a tuple of the summed loss and its weight"
_COUNTS = "a weight counts tokens or samples: 0 or more, and finite"


def sum_and_weight(result: Any, share: float = 1.0) -> tuple[torch.Tensor, float | torch.Tensor]:
    """The summed loss and its weight; a bare scalar is a mean with weight 1.

    Args:
        result: what a loss function returned.
        share: the share of a micro-batch that `result` was computed on; a mean counts for that much.

    Returns:
        A scalar tensor with a gradient, in FP32 or FP64, and a host number or a scalar tensor without one.

    Raises:
        ModelError: the result is neither, is not a scalar, or does not depend on any parameter.
    """
    if isinstance(result, torch.Tensor):
        mean = _checked(result)
        return (mean if share == 1.0 else mean * share), share
    if not isinstance(result, tuple):
        raise ModelError(f"The loss function returned {type(result).__name__}; {_SHAPES}.")
    if len(result) != 2 or not isinstance(result[0], torch.Tensor):
        kinds = ", ".join(type(value).__name__ for value in result)
        raise ModelError(f"The loss function returned a tuple of ({kinds}); {_SHAPES}.")
    total = _checked(result[0])
    return total, _weight(result[1], total.device)


def check_total(weight: float) -> None:
    """See that the weights of a window, of which tensors were not read one by one, are a count; a NaN skips the update.

    Raises:
        ModelError: they add up to something negative or to infinity.
    """
    if weight < 0 or weight == math.inf:
        raise ModelError(f"The weights of a window add up to {weight:g}; {_COUNTS}.")


def _checked(loss: torch.Tensor) -> torch.Tensor:
    if loss.dim() and loss.numel() != 1:
        raise ModelError(f"The loss has shape {tuple(loss.shape)}; reduce it to a scalar with `.sum()` or `.mean()`.")
    if not loss.requires_grad:
        raise ModelError(
            "The loss does not depend on any parameter that needs gradients; look for `torch.no_grad`, `.detach()`, "
            "`.item()` or frozen parameters on the way from the model to the loss."
        )
    if loss.dtype in HALF_DTYPES:
        loss = loss.float()
    return loss.reshape(()) if loss.dim() else loss


def _weight(weight: Any, device: torch.device) -> float | torch.Tensor:
    if isinstance(weight, (int, float)):
        if not 0 <= weight < math.inf:
            raise ModelError(f"The loss function returned the weight {weight}; {_COUNTS}.")
        return float(weight)
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        weight = weight.detach().reshape(()).to(torch.float32)
        return weight if weight.device == device else float(weight)
    shape = f"shape {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else type(weight).__name__
    raise ModelError(f"The loss function returned a weight of {shape}; the weight is a number or a scalar tensor.")
