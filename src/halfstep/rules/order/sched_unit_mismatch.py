"""Rule HS403: sched-unit-mismatch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Ref, SchedulerStep, Step, Turn
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity
from halfstep.rules.listening import same_turn

CARD = Card(
    code="HS403",
    name="sched-unit-mismatch",
    severity=Severity.ERROR,
    what="A scheduler is sized in one unit and stepped in another.",
    why=(
        "Sized in batches and stepped per epoch it hardly moves; sized in epochs and stepped per batch it is "
        "at its end within the first epoch."
    ),
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader))
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        scheduler.step()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        scheduler.step()
""",
    unfixed=("Either the length or the place where the scheduler moves may be what was meant."),
)


EPOCH_LITERALS = 200
"""Step sizes and milestones up to this are epochs in all recipes that we know."""

_BATCHES = re.compile(r"iter|step(?!_?size)|batch|update", re.I)
"""Words in the name of a length that counts batches."""


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Compare what the length counts with how often the scheduler moves."""
    moves: dict[Ref, list[SchedulerStep]] = {}
    for event in trace.of(SchedulerStep):
        moves.setdefault(event.scheduler, []).append(event)
    for scheduler, events in moves.items():
        event = events[min(len(events) - 1, 1)]
        horizon = trace.fact(scheduler, "horizon")
        if not isinstance(horizon, frozenset) or scheduler.given or trace.fact(scheduler, "part of") is not None:
            continue
        if len({e.place for e in events}) > 1 or any(e.argument for e in events):
            continue
        per_batch = _per_batch(event, [s for s in trace.of(Step) if s.optimizer == event.optimizer])
        if per_batch is None:
            continue
        where = _where(trace, scheduler)
        if not per_batch and "loader" in horizon and event.loops:
            yield Found(event.place, f"`{scheduler.name}` is sized in batches ({where}) but moves once an epoch")
        elif per_batch and "epochs" in horizon and "loader" not in horizon:
            yield Found(event.place, f"`{scheduler.name}` is sized in epochs ({where}) but moves once a batch")
        elif per_batch and "loader" not in horizon and len(event.loops) > 1 and _epoch_literal(trace, scheduler):
            yield Found(event.place, f"`{scheduler.name}` counts in epochs ({where}) but moves once a batch")


def _per_batch(event: SchedulerStep, steps: list[Step]) -> bool | None:
    deep = max((len(s.loops) for s in steps), default=0)
    if not deep or _once_an_epoch(steps[-1].loops[-1:]) or (deep == 1 and not _within_epoch(steps[-1].loops[-1:])):
        return None
    if len(event.loops) == deep and same_turn(event, min(steps, key=lambda s: abs(s.serial - event.serial))):
        return True
    if len(event.loops) == deep - 1:
        return False
    return None


def _once_an_epoch(loops: tuple[Turn, ...]) -> bool:
    """Whether a loop counts epochs itself, so that one step is an epoch."""
    return any("epochs" in turn.tags and "loader" not in turn.tags for turn in loops)


def _within_epoch(loops: tuple[Turn, ...]) -> bool:
    """Whether a loop without another around it takes several turns for an epoch."""
    return any(turn.tags & {"loader", "part"} for turn in loops)


def _where(trace: Trace, scheduler: Ref) -> str:
    made = trace.made(scheduler)
    return f"line {made.place.line}" if made is not None and made.place is not None else "elsewhere"


def _epoch_literal(trace: Trace, scheduler: Ref) -> bool:
    kind, args = trace.fact(scheduler, "class"), trace.fact(scheduler, "args")
    if not isinstance(args, dict) or _BATCHES.search(str(trace.fact(scheduler, "text"))):
        return False
    gamma = args.get("gamma", 0.1)
    if kind == "MultiStepLR":
        stones = args.get("milestones")
        return (
            isinstance(stones, (list, tuple)) and bool(stones) and all(isinstance(m, int) and m <= EPOCH_LITERALS for m in stones)
        )
    if kind == "StepLR":
        size = args.get("step_size")
        return isinstance(size, int) and 1 < size <= EPOCH_LITERALS and isinstance(gamma, float) and gamma <= 0.5
    return kind == "ExponentialLR" and isinstance(gamma, float) and gamma < 0.98
