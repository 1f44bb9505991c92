"""Clipping, overflow and what must not move with a skipped update."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from halfstep.certify.certificate import Line, Topic
from halfstep.certify.exact import FLOOR, Exact, Result, apart, norm, scaled
from halfstep.certify.recording import recorded, update_of
from halfstep.certify.stillness import plain_loss
from halfstep.certify.subject import Parts, seed_all
from halfstep.config.options import Precision
from halfstep.engine import Engine
from halfstep.engine.batch import num_samples, split
from halfstep.engine.finish import CLIP_EPSILON
from halfstep.engine.loss import LossFunction, sum_and_weight
from halfstep.precision.scaler import ScalerSettings
from halfstep.precision.select import available, tolerance

UPDATES = 6
LOW_SCALE = 2.0
"""A loss scale under which nothing overflows by itself."""
SKIPPED = (2, 4)
"""Updates, from 1, that are made to overflow."""


def skip_lines(parts: Parts, right: Exact) -> Iterator[Line]:
    """The claims about clipping and skipped updates of the global batch, whose right result is given."""
    yield _clipped(parts, right, Precision.FP32)
    verdict = available(next(parts.model.parameters()).device)[Precision.FP16]
    if verdict.value:
        yield _clipped(parts, right, Precision.FP16)
        yield _halved(parts)
    else:
        yield Line(topic=Topic.SKIPS, claim="clipping and overflow under a loss scale", holds=None, note=verdict.reason)
    yield from _overflow(parts)
    yield _after_a_skip(parts, right)


def _clipped(parts: Parts, right: Exact, precision: Precision) -> Line:
    whole = norm(right.result.gradients)
    limit = whole / 2
    found, update = update_of(parts, parts.batches, precision=precision.value, clip_norm=limit)
    applied, exactly = abs(norm(found.gradients) / limit - 1), FLOOR + CLIP_EPSILON / limit
    reported = abs(update.grad_norm / whole - 1)
    turned = apart(scaled(right.result.gradients, limit / whole), found.gradients)[0]
    products = sum(p.dim() >= 2 for p in parts.model.parameters())
    allowed = right.tolerance if precision is Precision.FP32 else tolerance(precision, 2 * products)
    scale = f" under a loss scale of {update.scale:g}" if precision is Precision.FP16 else ""
    return Line(
        topic=Topic.SKIPS,
        claim=f"clipping at half of the true norm{scale}: norm and gradient applied, and norm reported, in {precision}",
        holds=applied <= exactly and turned <= allowed + exactly and reported <= allowed,
        figure=f"applied norm {applied:.1e} from the limit, gradient {turned:.1e} from half of the true one; reported "
        f"{reported:.1e} from the true norm {whole:.4g}",
        tolerance=f"{exactly:.1e} for the limit, the {CLIP_EPSILON:g} that clipping adds; {allowed:.1e} for the others, the "
        f"rounding of {precision}",
    )


def _small(parts: Parts) -> list[Any]:
    """Single samples, for a CPU takes long for FP16; whole micro-batches where the model refuses so little."""
    single = [split(batch, num_samples(batch))[0] for batch in parts.batches[:2]]
    try:
        plain_loss(parts, single, 0)
    except Exception:  # whatever the user's model raises
        return list(parts.batches[:2])
    return single


def _halved(parts: Parts) -> Line:
    """Two small windows in FP16, of which the first overflows."""
    batches = _small(parts)
    loss, scaler = _Poison(parts.loss, window=2, skipped=(1,)), ScalerSettings(init_scale=LOW_SCALE)
    engine, optimizer = recorded(parts, loss=loss, scaler=scaler, accumulate=2, precision="fp16")
    one, two = engine.update(list(batches)), engine.update(list(batches))
    return Line(
        topic=Topic.SKIPS,
        claim="an overflow in the middle of a window halves the loss scale, once, and the next update is applied",
        holds=two.scale == one.scale / 2 and [one.applied, two.applied, len(optimizer.heard)] == [False, True, 1],
        figure=f"scale {one.scale:g}, then {two.scale:g}; {len(optimizer.heard)} of 2 updates applied",
        tolerance="exact",
    )


class _Poison:
    """A loss whose backward overflows in the second micro-batch of some updates."""

    def __init__(self, loss: LossFunction, window: int, skipped: Sequence[int] = SKIPPED) -> None:
        self._loss, self._window, self._skipped = loss, window, skipped
        self._calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        update, micro_batch = divmod(self._calls, self._window)
        self._calls += 1
        total, weight = sum_and_weight(self._loss(model, batch))
        if update + 1 in self._skipped and micro_batch == 1:
            total.register_hook(lambda gradient: gradient * float("inf"))  # type: ignore[no-untyped-call]
        return total, weight


def _overflow(parts: Parts) -> Iterator[Line]:
    model = copy.deepcopy(parts.model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    scheduler = LambdaLR(optimizer, lambda applied: 1.0 / (1 + applied))
    seed_all(0)
    loss = _Poison(parts.loss, len(parts.batches))
    engine = Engine(model, optimizer, loss=loss, scheduler=scheduler, precision="fp32", accumulate=len(parts.batches))
    untouched, steps = [], []
    for number in range(1, UPDATES + 1):
        before = _state(model, optimizer)
        applied = engine.update(list(parts.batches)).applied
        if number in SKIPPED:
            untouched.append(not applied and _equal(before, _state(model, optimizer)))
        steps.append(scheduler.last_epoch)
    applied_updates = UPDATES - len(SKIPPED)
    yield Line(
        topic=Topic.SKIPS,
        claim="an overflow in the middle of a window: the update is skipped, parameters and optimizer bitwise untouched",
        holds=all(untouched),
        figure=f"{sum(untouched)} of {len(SKIPPED)} skipped updates left everything as it was",
        tolerance="bitwise",
        note="; ".join(dict.fromkeys(str(entry.cause) for entry in engine.ledger.skips)),
    )
    yield Line(
        topic=Topic.SKIPS,
        claim="the scheduler moves on applied updates only",
        holds=steps[-1] == applied_updates and engine.ledger.applied == applied_updates,
        figure=f"{steps[-1]} steps after {engine.ledger.applied} applied and {len(engine.ledger.skips)} skipped updates",
        tolerance="exact",
    )


def _after_a_skip(parts: Parts, right: Exact) -> Line:
    """Nothing of a skipped window is left in the next one."""
    window = len(parts.batches)
    engine, optimizer = recorded(parts, loss=_Poison(parts.loss, window), accumulate=window)
    for _ in range(3):
        update = engine.update(list(parts.batches))
    apart, where = right.deviation(Result(loss=update.loss, gradients=optimizer.heard[-1]))
    return Line(
        topic=Topic.SKIPS,
        claim="the update after a skipped one has the right gradient",
        holds=apart <= right.tolerance and len(optimizer.heard) == 2,
        figure=f"{apart:.1e} of its norm away, most in {where}",
        tolerance=f"{right.tolerance:.1e}: {right.source}",
    )


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers(), *kept)]


def _equal(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
