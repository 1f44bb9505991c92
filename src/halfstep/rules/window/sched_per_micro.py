"""Rule HS404: sched-per-micro."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Ref, SchedulerStep, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Safety, Severity
from halfstep.rules.listening import accumulation, into_window

CARD = Card(
    code="HS404",
    name="sched-per-micro",
    severity=Severity.ERROR,
    what="The scheduler moves on every micro-batch, the optimizer once a window.",
    why="Warm-up and decay end as many times too early.",
    example="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=1000)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=1000)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Several moves of a scheduler between two steps of its optimizer, one for each micro-batch."""
    if trace.exception is not None:
        return
    for event in trace.of(SchedulerStep):
        way = accumulation(trace, event.optimizer) if event.optimizer is not None else None
        if way is None or event.argument or _sized_in_micro_batches(trace, event.scheduler):
            continue
        steps = sum(e.optimizer == event.optimizer for e in trace.of(Step))
        if _moves(trace, event) >= steps * max(2, way.size - 1):
            fix = into_window(trace, event, event.optimizer) if event.optimizer is not None else None
            yield Found(
                event.place, f"`{event.scheduler.name}` moves on every micro-batch, its optimizer once in {way.size}", fix
            )
            return


def _moves(trace: Trace, move: SchedulerStep) -> int:
    """How often a scheduler moves after a backward pass: moves in a row count once."""
    moves, ran = 0, False
    for event in trace.of(Backward, SchedulerStep):
        if isinstance(event, Backward):
            ran = ran or move.optimizer in event.optimizers
        elif event.scheduler == move.scheduler:
            moves, ran = moves + ran, False
    return moves


def _sized_in_micro_batches(trace: Trace, scheduler: Ref) -> bool:
    horizon = trace.fact(scheduler, "horizon")
    return isinstance(horizon, frozenset) and "loader" in horizon and "/accum" not in horizon
