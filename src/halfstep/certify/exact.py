"""What is right: loss and gradient of a global batch in FP64, and how far plain PyTorch in FP32 is from them."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfstep.certify.subject import Parts, seed_all
from halfstep.engine.batch import map_tensors
from halfstep.engine.loss import sum_and_weight
from halfstep.errors import ModelError

SLACK = 4.0
"""How many times plain PyTorch's own rounding error is allowed: another order of additions rounds differently."""
FLOOR = 8 * torch.finfo(torch.float32).eps
"""The least that is allowed, for a comparison whose own rounding happens to vanish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a global batch gives.

    Attributes:
        loss: its weighted mean loss.
        gradients: by parameter name, on the CPU.
    """

    loss: float
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """The right result, and what may differ from it.

    Attributes:
        result: in FP64, or in FP32 where the model does not run in FP64.
        tolerance: relative deviation that rounding explains.
        source: where the tolerance comes from, in words.
    """

    result: Result
    tolerance: float
    source: str

    def deviation(self, other: Result) -> tuple[float, str]:
        """Norm of the gradient's difference over the gradient's, and the parameter that differs most."""
        return apart(self.result.gradients, other.gradients)

    def must_say_something(self) -> None:
        """See that a wrong gradient would be told from this one.

        Raises:
            ModelError: it is zero, or not finite, so that every claim would hold, or none.
        """
        size = norm(self.result.gradients)
        if not 0 < size < math.inf:
            raise ModelError(
                f"The gradient of the global batch has norm {size:g} and its loss is {self.result.loss:g}: nothing can be "
                "certified by it. Give a batch that the model learns something from."
            )

    def loss_deviation(self, loss: float) -> float:
        """Relative difference of a loss."""
        return abs(loss - self.result.loss) / max(abs(self.result.loss), torch.finfo(torch.float32).tiny)


def exact(parts: Parts, batches: Sequence[Any]) -> Exact:
    """Loss and gradient of the batches as `numerics` defines them: sums over all, divided by the sum of the weights."""
    plain = by_hand(parts, batches, torch.float32)
    try:
        right = by_hand(parts, batches, torch.float64)
    except (RuntimeError, TypeError) as error:
        source = f"{SLACK:g} units of FP32 rounding times the square root of the values; FP64 does not run ({error})"
        values = max(gradient.numel() for gradient in plain.gradients.values())
        return Exact(result=plain, tolerance=SLACK * torch.finfo(torch.float32).eps * values**0.5, source=source)
    rounding = apart(right.gradients, plain.gradients)[0]
    source = f"{SLACK:g} times plain PyTorch's own rounding in FP32 ({rounding:.1e} from FP64), at least 8 units of FP32"
    return Exact(result=right, tolerance=max(SLACK * rounding, FLOOR), source=source)


def by_hand(parts: Parts, batches: Sequence[Any], dtype: torch.dtype) -> Result:
    """The same in plain PyTorch, without the engine."""
    model = copy.deepcopy(parts.model).to(dtype)
    device = next(model.parameters()).device
    seed_all(0)
    loss_sum, weight_sum = 0.0, 0.0
    for batch in batches:
        total, weight = sum_and_weight(parts.loss(model, map_tensors(batch, lambda t: _as(t, dtype, device))))
        torch.autograd.backward(total)
        loss_sum, weight_sum = loss_sum + total.item(), weight_sum + float(weight)
    if not weight_sum:
        raise ModelError("Nothing counts in the batches: the weights that the loss function returned with them are all 0.")
    return Result(loss=loss_sum / weight_sum, gradients=scaled(gradients_of(model), 1.0 / weight_sum))


def _as(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else None)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients that there are, by name."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def scaled(gradients: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    """The gradients times a factor, on the CPU."""
    return {name: (gradient * factor).cpu() for name, gradient in gradients.items()}


def apart(right: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Norm of the difference over the norm of the first, and the parameter with the largest part in it."""
    if right.keys() != found.keys():
        missing = sorted(right.keys() ^ found.keys())
        return float("inf"), f"{missing[0]}, which has a gradient in one of the two only"
    squares = {name: float((found[name].double() - right[name].double()).square().sum()) for name in right}
    whole = sum(float(gradient.double().square().sum()) for gradient in right.values())
    worst = max(squares, key=lambda name: squares[name] if squares[name] == squares[name] else float("inf"))
    difference = sum(squares.values()) ** 0.5
    return (difference / whole**0.5 if whole else difference), worst


def norm(gradients: dict[str, torch.Tensor]) -> float:
    """The norm over all."""
    return float(sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5)
