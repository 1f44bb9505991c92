"""Rule HS413: sched-double-step."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Ref, SchedulerStep, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS413",
    name="sched-double-step",
    severity=Severity.ERROR,
    what="One scheduler is moved at two places for the same step.",
    why="The schedule runs twice as fast, or once more an epoch than planned.",
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            scheduler.step()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Two moves from different places with no step between, in a program that steps; said of that nearer to the loop."""
    if not trace.has(Step):
        return
    last: dict[Ref, SchedulerStep] = {}
    for event in trace.of(SchedulerStep, Step):
        if isinstance(event, Step):
            last.clear()
        else:
            before = last.get(event.scheduler)
            if before is not None and before.place != event.place and not (before.argument or event.argument):
                again, first = (before, event) if len(before.stack) < len(event.stack) else (event, before)
                fix = FixRequest("delete-again", again.place, other=first.place) if again.place and first.place else None
                line = first.place.line if first.place else "?"
                yield Found(again.place, f"`{event.scheduler.name}` is moved for this step in line {line} too", fix)
            last[event.scheduler] = event
