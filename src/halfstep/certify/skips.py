"""Clipping, overflow and what must not move with a skipped update."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from halfstep.certify.certificate import Line, Topic
from halfstep.certify.exact import FLOOR, Result, exact, norm
from halfstep.certify.recording import recorded, update_of
from halfstep.certify.subject import Parts, seed_all
from halfstep.config.options import Precision
from halfstep.engine import Engine
from halfstep.engine.finish import CLIP_EPSILON
from halfstep.engine.loss import sum_and_weight
from halfstep.precision.select import available, tolerance

UPDATES = 6
SKIPPED = (2, 4)
"""Updates, from 1, that are made to overflow."""


def skip_lines(parts: Parts) -> Iterator[Line]:
    """The claims about clipping and skipped updates."""
    yield _clipped(parts, Precision.FP32)
    verdict = available(next(parts.model.parameters()).device).get(Precision.FP16)
    if verdict is None or not verdict.value:
        why = "FP16 cannot be trained here" if verdict is None else verdict.reason
        yield Line(topic=Topic.SKIPS, claim="clipping under a loss scale", holds=None, note=why)
    else:
        yield _clipped(parts, Precision.FP16)
    yield from _overflow(parts)


def _clipped(parts: Parts, precision: Precision) -> Line:
    right = exact(parts, parts.batches)
    whole = norm(right.result.gradients)
    limit = whole / 2
    found, update = update_of(parts, parts.batches, precision=precision.value, clip_norm=limit)
    applied, exactly = abs(norm(found.gradients) / limit - 1), FLOOR + CLIP_EPSILON / limit
    reported = abs(update.grad_norm / whole - 1)
    products = sum(p.dim() >= 2 for p in parts.model.parameters())
    allowed = right.tolerance if precision is Precision.FP32 else tolerance(precision, 2 * products)
    scale = f" under a loss scale of {update.scale:g}" if precision is Precision.FP16 else ""
    return Line(
        topic=Topic.SKIPS,
        claim=f"clipping at half of the true norm{scale}: applied norm and reported norm in {precision}",
        holds=applied <= exactly and reported <= allowed,
        figure=f"applied {applied:.1e} from the limit; reported {reported:.1e} from the true norm {whole:.4g}",
        tolerance=f"{exactly:.1e} for the first, the {CLIP_EPSILON:g} that clipping adds; {allowed:.1e} for the second, the "
        f"rounding of {precision}",
    )


class _Poison:
    """A loss whose backward overflows in the second micro-batch of some updates."""

    def __init__(self, parts: Parts) -> None:
        self._loss, self._window = parts.loss, len(parts.batches)
        self._calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        update, micro_batch = divmod(self._calls, self._window)
        self._calls += 1
        total, weight = sum_and_weight(self._loss(model, batch))
        if update + 1 in SKIPPED and micro_batch == 1:
            total.register_hook(lambda gradient: gradient * float("inf"))  # type: ignore[no-untyped-call]
        return total, weight


def _overflow(parts: Parts) -> Iterator[Line]:
    model = copy.deepcopy(parts.model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    scheduler = LambdaLR(optimizer, lambda applied: 1.0 / (1 + applied))
    seed_all(0)
    engine = Engine(model, optimizer, loss=_Poison(parts), scheduler=scheduler, precision="fp32", accumulate=len(parts.batches))
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
    yield _after_a_skip(parts)


def _after_a_skip(parts: Parts) -> Line:
    """Nothing of a skipped window is left in the next one."""
    engine, optimizer = recorded(parts, loss=_Poison(parts), accumulate=len(parts.batches))
    for _ in range(3):
        update = engine.update(list(parts.batches))
    right = exact(parts, parts.batches)
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
