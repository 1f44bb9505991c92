"""Which precision "auto" takes: what the device has, what the model does in it, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite, sqrt
from statistics import median
from typing import Any

import torch
from torch import nn

from halfstep.config.choice import Choice
from halfstep.config.options import Precision
from halfstep.errors import DeviceError
from halfstep.measure.dtypes import Arithmetic, DtypeSupport, Support, dtype_support
from halfstep.measure.rate_cache import Rates, known_or_measured_rates
from halfstep.measure.stats import Measured, paired_ratio, summarize
from halfstep.precision.kept import keep_precision
from halfstep.precision.policy import policy_for
from halfstep.precision.trial import FP16_SCALE, LossFunction, Trial, is_compiled, leave_no_doubt, run_trials

TRIAL_BUDGET_S = 2.0
GAIN = 1.05
"""Speeds closer than this are the same: between two runs of one program they differ as much."""
GAIN_OF_ONE_RUN = 1.25
"""The same where each was run once, the first in a process, so that nothing is known of the spread."""

Verdict = Choice[bool]
Broadcast = Callable[[Choice[Precision]], Choice[Precision]]
ARITHMETIC = {
    Precision.FP32: Arithmetic.FP32,
    Precision.FP16: Arithmetic.FP16,
    Precision.BF16: Arithmetic.BF16,
    Precision.BF16_PURE: Arithmetic.BF16,
}


def available(device: torch.device) -> dict[Precision, Verdict]:
    """Whether a run on `device` can be asked for each precision, with what tells so."""
    support = dtype_support(device)
    return {precision: _available(precision, device, support[ARITHMETIC[precision]]) for precision in Precision}


def candidates(device: torch.device) -> list[Precision]:
    """What "auto" may choose from on `device`: FP32, then the half precisions with instructions of their own.

    Pure BF16 changes what is stored, so that it is never chosen unasked.
    """
    support = dtype_support(device)
    halves = [
        precision
        for precision in (Precision.BF16, Precision.FP16)
        if support[ARITHMETIC[precision]].native and available(device)[precision].value
    ]
    return [Precision.FP32, *halves]


def select_precision(
    model: nn.Module,
    loss: LossFunction,
    batch: Any,
    device: torch.device,
    *,
    group_broadcast: Broadcast | None = None,
    budget_s: float = TRIAL_BUDGET_S,
    key: str | None = None,
) -> Choice[Precision]:
    """The fastest precision whose loss agrees with FP32, for this model on this device.

    Runs forward and backward of the model itself for a second or two, and leaves parameters, gradients, buffers, modes and
    random states bitwise as they were. A precision in which the model does not run is ruled out; where it does not even
    run in FP32, the device's matmul rates decide.

    Args:
        model: the module itself, not wrapped for several ranks, on its device.
        loss: `loss(model, batch)` returns a mean, or a sum and its weight.
        batch: one micro-batch, on the device.
        device: where the model is.
        group_broadcast: gives every rank the choice of the first; all ranks must then call this function.
        budget_s: about how long to take.
        key: where to keep the choice for `kept_precision`, if the times leave no doubt; see `halfstep.precision.kept.key_of`.
    """
    choice = _select(model, loss, batch, device, budget_s, key)
    return choice if group_broadcast is None else group_broadcast(choice)


def explain_without_model(device: torch.device, *, rates: Rates | None = None) -> Choice[Precision]:
    """What "auto" is likely to choose on `device`, from its matmul rates alone.

    Args:
        device: where a run would be.
        rates: measured rates; read from the cache or measured where they are not given. Empty if none are known.
    """
    if rates is None:
        rates = known_or_measured_rates(device)
    halves = candidates(device)[1:]
    if not halves:
        return Choice(value=Precision.FP32, reason=f"{device.type} has instructions for no half precision: {_lacks(device)}")
    if any(name not in rates for name in (Arithmetic.FP32, *(ARITHMETIC[precision] for precision in halves))):
        return _unmeasured(device, halves)
    return _by_rates(device, halves, rates)


def decide(trials: Mapping[Precision, Trial], *, num_products: int, tie: Precision = Precision.FP32) -> Choice[Precision]:
    """The fastest trial whose loss agrees with FP32, and why, in one sentence.

    Args:
        trials: of FP32 and of other precisions; FP32 ran.
        num_products: matrix products in a forward, each of which rounds.
        tie: what to take where it agrees and is neither faster nor slower than FP32 beyond the noise.
    """
    exact = trials[Precision.FP32]
    if not isfinite(exact.losses[0]):
        return Choice(
            value=Precision.FP32,
            reason=f"the loss is {exact.losses[0]} in fp32 on the first micro-batch, which no other precision can be judged by",
        )
    others: list[Precision] = [name for name in trials if name is not Precision.FP32]
    verdicts = {name: judge(trials[name], exact, num_products) for name in others}
    best = exact
    for name, verdict in verdicts.items():
        if verdict.value and _wins(trials[name], best, tie=tie):
            best = trials[name]
    lost = [_lost(trials[name], exact, verdict) for name, verdict in verdicts.items() if name is not best.precision]
    won = _took(exact) if best is exact else _won(best, exact, verdicts[best.precision])
    return Choice(value=best.precision, reason="; ".join([won, *lost]))


def judge(trial: Trial, exact: Trial, num_products: int) -> Verdict:
    """Whether a trial agrees with FP32, and by how much."""
    name = trial.precision
    if trial.refused is not None:
        return Choice(value=False, reason=f"{name} ruled out: {trial.refused}")
    if not all(isfinite(loss) for loss in trial.losses):
        return Choice(value=False, reason=f"{name} ruled out: its loss is not finite")
    broken = trial.gradients.not_finite > exact.gradients.not_finite
    if broken and name is not Precision.FP16:
        count = f"{trial.gradients.not_finite} of {trial.gradients.total}"
        return Choice(value=False, reason=f"{name} ruled out: {count} gradient values are not finite, which they are in fp32")
    return _agreement(trial, exact, num_products)


def tolerance(precision: Precision, num_products: int) -> float:
    """How far, relatively, a loss may be from FP32's.

    Each product rounds its inputs and its output to the unit roundoff u. Such roundings are as good as independent, so that n of
    them add up to about u * sqrt(n) and not to u * n (Higham, "Accuracy and Stability of Numerical Algorithms", 2.8);
    the factor 2 allows for inputs and output. The loss itself counts as one more.
    """
    dtype = ARITHMETIC[precision].dtype
    return 2 * sqrt(num_products + 1) * torch.finfo(dtype).eps / 2


def _available(precision: Precision, device: torch.device, told: DtypeSupport) -> Verdict:
    try:
        policy_for(precision, device)
    except DeviceError as error:
        return Choice(value=False, reason=str(error))
    if told.support is Support.ABSENT:
        return Choice(value=False, reason=f"absent: {told.because}")
    return Choice(value=True, reason=f"{told.support}: {told.because}")


def _select(
    model: nn.Module, loss: LossFunction, batch: Any, device: torch.device, budget_s: float, key: str | None
) -> Choice[Precision]:
    names = candidates(device)
    if names == [Precision.FP32]:
        return explain_without_model(device, rates={})
    trials = run_trials(model, loss, batch, names, device, budget_s=budget_s)
    exact = trials[Precision.FP32]
    if exact.refused is not None:
        return _without_reference(trials, device)
    tie = Precision.BF16 if device.type != "cpu" and Precision.BF16 in names else Precision.FP32
    choice = decide(trials, num_products=_num_products(model), tie=tie)
    eager = "; tried without compilation" if is_compiled(model) else ""
    choice = Choice(value=choice.value, reason=choice.reason + eager)
    if key is not None and leave_no_doubt({name: trial.seconds for name, trial in trials.items() if trial.refused is None}):
        keep_precision(key, choice)
    return choice


def _num_products(model: nn.Module) -> int:
    """Weights of two dimensions and more: each takes part in one product."""
    return sum(parameter.dim() >= 2 for parameter in model.parameters())


def _without_reference(trials: Mapping[Precision, Trial], device: torch.device) -> Choice[Precision]:
    """Where FP32 does not fit, a half precision still may; where nothing runs, the rates decide."""
    failed = f"the model could not be tried in fp32 ({trials[Precision.FP32].refused})"
    ran = [trial for trial in trials.values() if trial.refused is None and all(isfinite(loss) for loss in trial.losses)]
    if ran:
        return Choice(value=ran[0].precision, reason=f"{failed}; {_took(ran[0])}, its loss could not be compared")
    by_rates = explain_without_model(device)
    return Choice(value=by_rates.value, reason=f"{failed}; {by_rates.reason}")


def _wins(trial: Trial, best: Trial, *, tie: Precision) -> bool:
    speedup = _speedup(best, trial)
    if trial.precision is tie and best.precision is Precision.FP32:
        return not _slower(speedup)
    return _faster(speedup)


def _faster(speedup: Measured) -> bool:
    """Beyond the noise: by five percent, and in three rounds of four."""
    return speedup.low > 1 and speedup.value >= (GAIN if speedup.count > 1 else GAIN_OF_ONE_RUN)


def _slower(speedup: Measured) -> bool:
    return speedup.high < 1 and speedup.value <= 1 / (GAIN if speedup.count > 1 else GAIN_OF_ONE_RUN)


def _speedup(slow: Trial, fast: Trial) -> Measured:
    """How many times as fast `fast` is, round by round; by the medians where one of the two was stopped early."""
    if len(slow.seconds) == len(fast.seconds):
        return paired_ratio(slow.seconds, fast.seconds)
    return summarize([median(slow.seconds) / median(fast.seconds)], "")


def _agreement(trial: Trial, exact: Trial, num_products: int) -> Verdict:
    name, here, there = trial.precision, median(trial.losses), median(exact.losses)
    relative = tolerance(name, num_products)
    limit = relative * abs(there) + max(exact.losses) - min(exact.losses)
    roundoff = f"2 * sqrt({num_products} products + 1) * {torch.finfo(ARITHMETIC[name].dtype).eps / 2:.2g}"
    told = f"loss {here:.6g} against {there:.6g} in fp32, limit {limit:.2g} = {roundoff} of it{_own_range(exact)}"
    if abs(here - there) > limit:
        return Choice(value=False, reason=f"{name} ruled out: {told}")
    return Choice(value=True, reason=told + _fp16_gradients(trial, exact))


def _own_range(exact: Trial) -> str:
    """A model with dropout has another loss each time, in any precision."""
    own = max(exact.losses) - min(exact.losses)
    return f" + {own:.2g} that fp32 itself varies by" if own > 0 else ""


def _fp16_gradients(trial: Trial, exact: Trial) -> str:
    if trial.precision is not Precision.FP16:
        return ""
    lost = max(0, trial.gradients.zero - exact.gradients.zero)
    return (
        f"; of {trial.gradients.total} gradient values at scale {FP16_SCALE:.0f}, {trial.gradients.not_finite} overflow "
        f"(the scale then falls) and {lost} become zero that are not in fp32"
    )


def _took(trial: Trial) -> str:
    return f"{trial.precision} forward and backward takes {summarize(trial.seconds, 's')}"


def _compared(trial: Trial, exact: Trial, *, exact_took: str = "") -> str:
    speedup = _speedup(exact, trial)
    interval = f" ({speedup.low:.2f} to {speedup.high:.2f})" if speedup.count > 1 else ""
    noise = "" if _faster(speedup) or _slower(speedup) else ", no difference beyond the noise"
    return f"{_took(trial)}, {speedup.value:.2f}{interval} times as fast as fp32{exact_took}{noise}"


def _won(trial: Trial, exact: Trial, verdict: Verdict) -> str:
    smaller = "" if _faster(_speedup(exact, trial)) else "; its activations take half the memory"
    told = _compared(trial, exact, exact_took=f" at {summarize(exact.seconds, 's')}")
    return f"{told}; {verdict.reason}{smaller}"


def _lost(trial: Trial, exact: Trial, verdict: Verdict) -> str:
    return _compared(trial, exact) if verdict.value else verdict.reason


def _lacks(device: torch.device) -> str:
    support = dtype_support(device)
    return ", ".join(f"{name} {support[name].support} ({support[name].because})" for name in (Arithmetic.BF16, Arithmetic.FP16))


def _unmeasured(device: torch.device, halves: list[Precision]) -> Choice[Precision]:
    likely = halves[0] if device.type != "cpu" else Precision.FP32
    native = ", ".join(str(precision) for precision in halves)
    return Choice(value=likely, reason=f"native: {native}; not measured, the model decides when a run begins")


def _by_rates(device: torch.device, halves: list[Precision], rates: Rates) -> Choice[Precision]:
    """As `decide`, with whole matmuls for trials; TF32 is what FP32 runs in where there is TF32."""
    full = Arithmetic.TF32 if Arithmetic.TF32 in rates else Arithmetic.FP32
    best = Precision.FP32
    for precision in halves:
        half, beaten = rates[ARITHMETIC[precision]], rates[full if best is Precision.FP32 else ARITHMETIC[best]]
        if half.low > beaten.high and half.value >= GAIN * beaten.value:
            best = precision
    if best is Precision.FP32 and device.type != "cpu" and rates[ARITHMETIC[halves[0]]].high >= rates[full].low:
        best = halves[0]
    told = ", ".join(f"{name} {rates[name]}" for name in (full, *(ARITHMETIC[precision] for precision in halves)))
    return Choice(value=best, reason=f"matmul: {told}; a run measures the model itself before it decides")
