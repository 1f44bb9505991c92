"""The end of an update: one read of the gradients, one multiplier, one step.

`unscale_`, clipping and `step` written by hand read and write the gradients several times. Here they are read once for the
norm, which tells overflow too; whatever they must be multiplied by (ranks, weight, loss scale, clipping) becomes one number,
and fused optimizers take that number into their kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from halfstep.config.choice import Choice
from halfstep.distributed.shards import local, norm_over_shards
from halfstep.engine.update import Number, as_scalar
from halfstep.errors import ModelError
from halfstep.precision.policy import HALF_DTYPES

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does."""

DOT_NUMEL = 2**16
"""From this size on, a dot product reads a CPU gradient faster than a norm does (measured: 5.3 against 6.1 ms for 42 M)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the end of an update found.

    Attributes:
        grad_norm: norm of the true gradient, before clipping.
        skipped: whether the parameters stayed as they were: known on the host, or a scalar tensor (1.0 or 0.0) on the device.
    """

    grad_norm: Number
    skipped: bool | torch.Tensor


class Finish:
    """Norm, overflow check, clipping and step of one or several optimizers.

    Args:
        optimizers: they share one norm and one verdict.
        clip_norm: largest norm of the whole gradient; None for no clipping.
        clip_value: largest magnitude of a gradient's element; None for no clipping.
        on_host: whether reading a tensor costs nothing, as on the CPU.
        sharded: whether the parameters are in shards, so that this rank's gradients are a part of the whole.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        clip_norm: float | None,
        clip_value: float | None,
        on_host: bool,
        sharded: bool = False,
    ) -> None:
        self._optimizers, self._sharded = optimizers, sharded
        self._clip_norm, self._clip_value = clip_norm, clip_value
        self.on_host = on_host
        self._fused = all(takes_multiplier(optimizer) for optimizer in optimizers)
        self.device = self.parameters[0].device
        self._divisor = torch.ones((), device=self.device)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """What the optimizers hold now: groups may be added, and parameters frozen and unfrozen, while training goes on."""
        return [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self._optimizers[0].param_groups[0]["lr"])

    @property
    def choice(self) -> Choice[str]:
        """How the multiplier reaches the optimizer, and why."""
        if self._clip_value is not None:
            return Choice(value="in place", reason="clipping by value needs the true gradients before the step")
        names = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
        if self._fused:
            return Choice(value="in the kernel", reason=f"{names} is fused and takes multiplier and skip flag")
        wait = "" if self.on_host else ", and the host waits for the overflow flag in every update"
        return Choice(value="in place", reason=f"{names} is not fused: gradients are multiplied once before the step{wait}")

    def __call__(self, unit: Number) -> Outcome:
        """End an update.

        Args:
            unit: what the accumulated gradients must be multiplied by to be the true gradient.
        """
        gradients = self._gradients()
        outcome = self._by_host(gradients, float(unit)) if self.on_host else self._by_device(gradients, unit)
        self.clear()
        return outcome

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def _gradients(self) -> list[torch.Tensor]:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if any(gradient.is_sparse for gradient in gradients):
            raise ModelError(
                "A gradient is sparse (`nn.Embedding(sparse=True)`?); halfstep needs dense ones: use `sparse=False`."
            )
        return [local(gradient) for gradient in gradients] if self._sharded else gradients

    def _by_host(self, gradients: list[torch.Tensor], unit: float) -> Outcome:
        norm = norm_on_host(gradients)
        norm = unit * (norm_over_shards(norm) if self._sharded else norm)
        if not math.isfinite(norm):
            return Outcome(grad_norm=norm, skipped=True)
        if self._clip_norm is not None:
            unit *= min(1.0, self._clip_norm / (norm + CLIP_EPSILON))
        if self._fused and self._clip_value is None:
            self._step(None if unit == 1.0 else self._divisor.fill_(1.0 / unit), None)
        else:
            self._multiply(gradients, unit)
            self._step(None, None)
        return Outcome(grad_norm=norm, skipped=False)

    def _by_device(self, gradients: list[torch.Tensor], unit: Number) -> Outcome:
        norm = norm_on_device(gradients, self.device)
        norm = unit * (norm_over_shards(norm) if self._sharded else norm)
        skipped = (~torch.isfinite(norm)).float()
        multiplier = as_scalar(unit, norm.device)
        if self._clip_norm is not None:
            multiplier = multiplier * (self._clip_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
        if self._fused and self._clip_value is None and not self._makes_momentum():
            self._step(multiplier.reciprocal(), skipped)
        elif not skipped.item():
            self._multiply(gradients, multiplier)
            self._step(None, None)
        return Outcome(grad_norm=norm, skipped=skipped)

    def _makes_momentum(self) -> bool:
        """Whether this step makes fused SGD's momentum: skipped by its kernel, it would leave it uninitialised (torch 2.13)."""
        return any(
            p.grad is not None and not optimizer.state.get(p)
            for optimizer in self._optimizers
            if isinstance(optimizer, torch.optim.SGD)
            for group in optimizer.param_groups
            if group["momentum"]
            for p in group["params"]
        )

    def _multiply(self, gradients: list[torch.Tensor], multiplier: Number) -> None:
        if isinstance(multiplier, torch.Tensor) or multiplier != 1.0:
            torch._foreach_mul_(gradients, multiplier)
        if self._clip_value is not None:
            torch._foreach_clamp_max_(gradients, self._clip_value)
            torch._foreach_clamp_min_(gradients, -self._clip_value)

    def _step(self, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Step as `GradScaler` does: fused kernels divide by `grad_scale` and do nothing where `found_inf` is 1."""
        for optimizer in self._optimizers:
            if grad_scale is None and found_inf is None:
                optimizer.step()
                continue
            optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def takes_multiplier(optimizer: Optimizer) -> bool:
    """Whether the optimizer's kernel takes `grad_scale` and `found_inf` (torch's fused ones do)."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and getattr(optimizer, "_step_supports_amp_scaling", False)


def norm_on_host(gradients: list[torch.Tensor]) -> float:
    """The 2-norm over all gradients, read once, as a host number.

    Read from last to first, so that the first gradients, which the step wants first, are the ones still in the cache.
    """
    large = [g for g in reversed(gradients) if _is_large(g)]
    squares = [torch.dot(flat, flat).item() for flat in (g.view(-1) for g in large)]
    small = [g for g in gradients if not _is_large(g)] if large else gradients
    squares += [norm * norm for norm in _host_norms(small)]
    total = math.fsum(squares) if math.isfinite(sum(squares)) else sum(squares)
    return math.sqrt(total)


def _is_large(gradient: torch.Tensor) -> bool:
    return gradient.numel() >= DOT_NUMEL and gradient.dtype == torch.float32 and gradient.is_contiguous()


def _host_norms(gradients: list[torch.Tensor]) -> list[float]:
    if not gradients:
        return []
    norms = _norms(gradients)
    if any(norm.dtype != norms[0].dtype for norm in norms):
        return [norm.item() for norm in norms]
    found: list[float] = torch.stack(norms).tolist()
    return found


def norm_on_device(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The 2-norm over all gradients, read once, as a scalar FP32 tensor on `device`; nothing waits for the host."""
    if not gradients:
        return torch.zeros((), device=device)
    norms = [norm.to(device, torch.float32, non_blocking=True) for norm in _norms(gradients)]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _norms(gradients: list[torch.Tensor]) -> tuple[torch.Tensor, ...] | list[torch.Tensor]:
    """Each gradient's norm; of BF16 gradients in FP32, for rounded to BF16 it would be wrong by up to 2^-9."""
    if gradients[0].dtype in HALF_DTYPES:
        return torch._foreach_norm(gradients, 2, torch.float32)
    return torch._foreach_norm(gradients)
