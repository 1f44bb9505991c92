"""A model's forward and backward, tried in several precisions without leaving a trace on it.

Parameters, gradients, buffers, training mode and random states are bitwise what they were when a trial has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.config.options import Precision
from halfstep.measure.clock import garbage_collection_off, synchronize
from halfstep.measure.dtypes import Arithmetic, dtype_support
from halfstep.measure.rates import float32_products
from halfstep.precision.policy import HALF_DTYPES, policy_for
from halfstep.precision.untouched import Buffers, RandomState, untouched

LossFunction = Callable[[nn.Module, Any], Any]
FP16_SCALE = 2.0**16
MOST_ROUNDS = 7
MOST_SLOW_ROUNDS = 3
SLOW_PASS_S = 0.3
DECISIVE = 1.25
"""Where every round of the first three says so much more or less speed, further ones would decide nothing else."""
CPU_OUT_OF_MEMORY = "can't allocate memory"
FIRST_PASSES_LIMIT = 3
HOPELESS = 4
"""A first pass that is slow and takes this many times FP32's is not repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCount:
    """Values of all gradients of one pass, counted.

    Attributes:
        total: how many there are.
        zero: those that are exactly zero.
        not_finite: those that are infinite or not a number.
    """

    total: int
    zero: int
    not_finite: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a model did in one precision.

    Attributes:
        precision: the precision.
        seconds: of forward and backward, one a round; the n-th of two trials belong together.
        losses: the mean loss of the first pass and of each round.
        gradients: the gradients of the first pass, at scale 2^16 for FP16.
        refused: why it could not run; the rest is then empty.
    """

    precision: Precision
    seconds: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    gradients: GradientCount = GradientCount(total=0, zero=0, not_finite=0)
    refused: str | None = None


def run_trials(
    model: nn.Module,
    loss: LossFunction,
    batch: Any,
    precisions: Sequence[Precision],
    device: torch.device,
    *,
    budget_s: float,
) -> dict[Precision, Trial]:
    """Forward and backward of `model` on `batch` in each of `precisions`, in turn.

    A first pass of each counts its gradients and warms up. Rounds follow while the budget lasts: seven at most, three
    where a pass takes more than 0.3 s, or where these three leave no doubt. Twice the budget may be spent on the first three,
    for less says nothing of the spread, and one is run even after that, for first passes hold what happens only once in a
    process; but where they took three times the budget they are the measurement.
    Where something does not fit or is not implemented, that precision is refused with its cause.

    Args:
        model: the module itself, not wrapped for several ranks.
        loss: takes the model and the batch; returns a mean, or a sum and its weight.
        batch: one micro-batch.
        precisions: FP32 first: the others are judged by it.
        device: where the model is.
        budget_s: about how long all of it may take.
    """
    with untouched(model, device), torch.enable_grad(), eager_if_compiled(model), garbage_collection_off():
        bench = _Bench(model=model, loss=loss, batch=batch, device=device, buffers=Buffers.of(model), rng=RandomState.of(device))
        for precision in precisions:
            bench.first_pass(precision)
        bench.repeat(budget_s)
        return bench.trials()


def eager_if_compiled(model: nn.Module) -> AbstractContextManager[object]:
    """Keep a compiled model from being compiled once for each precision tried."""
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` or `Module.compile` was applied to `model` or to a part of it."""
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in model.modules())


@dataclass(slots=True, kw_only=True)
class _Bench:
    """The passes of one call of `run_trials`."""

    model: nn.Module
    loss: LossFunction
    batch: Any
    device: torch.device
    buffers: Buffers
    rng: RandomState
    first_seconds: dict[Precision, float] = field(default_factory=dict)
    seconds: dict[Precision, list[float]] = field(default_factory=dict)
    losses: dict[Precision, list[float]] = field(default_factory=dict)
    gradients: dict[Precision, GradientCount] = field(default_factory=dict)
    refused: dict[Precision, str] = field(default_factory=dict)

    def first_pass(self, precision: Precision) -> None:
        """FP32 multiplies exactly here, whatever the device does later, because the others are judged by its loss."""
        with float32_products(exact=True, device=self.device):
            passed = self._try(precision)
        if passed is not None:
            seconds, loss, gradients = passed
            self.first_seconds[precision] = seconds
            self.losses[precision], self.seconds[precision] = [loss], []
            self.gradients[precision] = count_gradients(gradients)

    def repeat(self, budget_s: float) -> None:
        """Rounds of all that are worth it, as `run_trials` says."""
        spent_s = sum(self.first_seconds.values())
        kept = self._worth_repeating() if spent_s <= FIRST_PASSES_LIMIT * budget_s else []
        slowest_s = round_s = 0.0
        for rounds in range(MOST_ROUNDS):
            few = rounds < MOST_SLOW_ROUNDS
            over = rounds > 0 and spent_s + round_s > budget_s * (2 if few else 1)
            told = slowest_s > SLOW_PASS_S or leave_no_doubt({name: self.seconds[name] for name in kept})
            if not kept or over or (told and not few):
                return
            started = time.perf_counter()
            kept = self._round(kept)
            round_s = time.perf_counter() - started
            spent_s += round_s
            slowest_s = max((self.seconds[precision][-1] for precision in kept), default=0.0)

    def trials(self) -> dict[Precision, Trial]:
        ran = {precision: self._trial(precision) for precision in self.losses if precision not in self.refused}
        return ran | {name: Trial(precision=name, refused=why) for name, why in self.refused.items()}

    def _trial(self, precision: Precision) -> Trial:
        return Trial(
            precision=precision,
            seconds=tuple(self.seconds[precision] or [self.first_seconds[precision]]),
            losses=tuple(self.losses[precision]),
            gradients=self.gradients[precision],
        )

    def _worth_repeating(self) -> list[Precision]:
        limit_s = max(SLOW_PASS_S, HOPELESS * self.first_seconds.get(Precision.FP32, float("inf")))
        return [precision for precision, seconds in self.first_seconds.items() if seconds <= limit_s]

    def _round(self, precisions: list[Precision]) -> list[Precision]:
        """One pass of each from the same random state, and those that ran; the next round goes on from FP32's."""
        ran, next_rng = [], None
        for precision in precisions:
            with float32_products(exact=not self._has_tf32, device=self.device):
                passed = self._try(precision)
            next_rng = next_rng or RandomState.of(self.device)
            if passed is not None:
                self.seconds[precision].append(passed[0])
                self.losses[precision].append(passed[1])
                ran.append(precision)
        self.rng = next_rng or self.rng
        return ran

    @property
    def _has_tf32(self) -> bool:
        return dtype_support(self.device)[Arithmetic.TF32].native

    def _try(self, precision: Precision) -> tuple[float, float, list[Tensor]] | None:
        """One pass, or `None` and its cause in `refused`. Whatever the user's code raises ends the trial, not the run."""
        try:
            return self._pass(precision)
        except Exception as error:
            self.refused[precision] = cause(error)
        _free_cached_memory(self.device)
        return None

    def _pass(self, precision: Precision) -> tuple[float, float, list[Tensor]]:
        self.buffers.restore()
        self.rng.restore()
        wanted = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        policy = policy_for(precision, self.device)
        synchronize(self.device)
        started = time.perf_counter()
        with policy.autocast():
            loss = mean_loss(self.loss(self.model, self.batch))
        scaled = loss * FP16_SCALE if policy.scaled else loss
        gradients = torch.autograd.grad(scaled, wanted, allow_unused=True)
        synchronize(self.device)
        seconds = time.perf_counter() - started
        return seconds, loss.item(), [gradient for gradient in gradients if gradient is not None]


def leave_no_doubt(seconds: Mapping[Precision, Sequence[float]]) -> bool:
    """Whether each precision is much faster than FP32, or much slower, in every round, and at most one is faster."""
    exact = seconds.get(Precision.FP32, ())
    ratios = [[a / b for a, b in zip(exact, each, strict=False)] for name, each in seconds.items() if name is not Precision.FP32]
    faster = [bool(each) and min(each) > DECISIVE for each in ratios]
    slower = [bool(each) and max(each) < 1 / DECISIVE for each in ratios]
    return bool(ratios) and sum(faster) <= 1 and sum(faster) + sum(slower) == len(ratios)


def mean_loss(result: Any) -> Tensor:
    """The mean of what a loss function returned: itself, or its sum over its weight."""
    if not isinstance(result, tuple):
        return _at_least_fp32(result)
    total, weight = result
    mean: Tensor = _at_least_fp32(total) / weight
    return mean


def _at_least_fp32(value: Tensor) -> Tensor:
    """A loss in FP16 would overflow when it is scaled."""
    return value.float() if value.dtype in HALF_DTYPES else value


def count_gradients(gradients: Sequence[Tensor]) -> GradientCount:
    """How many values of `gradients` are zero and how many are not finite, read from the device once."""
    if not gradients:
        return GradientCount(total=0, zero=0, not_finite=0)
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    total = sum(gradient.numel() for gradient in dense)
    nonzero = torch.stack([torch.count_nonzero(gradient) for gradient in dense]).sum()
    finite = torch.stack([torch.isfinite(gradient).sum() for gradient in dense]).sum()
    num_nonzero, num_finite = torch.stack([nonzero, finite]).tolist()
    return GradientCount(total=total, zero=total - num_nonzero, not_finite=total - num_finite)


def cause(error: Exception) -> str:
    """The first line of an error, after what kind it is; no reference to the error, which holds tensors, is kept."""
    if isinstance(error, torch.OutOfMemoryError) or CPU_OUT_OF_MEMORY in str(error):
        return "out of memory"
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}"


def _free_cached_memory(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
