"""Rule HS402: sched-before-optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Ref, SchedulerStep, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import same_turn

CARD = Card(
    code="HS402",
    name="sched-before-optimizer",
    severity=Severity.WARNING,
    what="The scheduler moves on before the optimizer's step.",
    why="The first learning rate is never used and the last step runs at the schedule's end, often at 0.",
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
            scheduler.step()
            optimizer.step()
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
    """A scheduler whose first step comes before the first step of its optimizer."""
    seen: set[Ref] = set()
    for event in trace.of(SchedulerStep):
        if event.scheduler in seen or event.optimizer is None or event.argument:
            continue
        seen.add(event.scheduler)
        steps = [s for s in trace.of(Step) if s.optimizer == event.optimizer]
        earlier = [s for s in trace.of(Step) if s.serial < event.serial]
        if steps and steps[0].serial > event.serial and not earlier and _related(event, steps[0]):
            fix = FixRequest("move-after", event.place, other=steps[0].place) if event.place and steps[0].place else None
            yield Found(
                event.place, f"`{event.scheduler.name}` moves on before the first step of `{steps[0].optimizer.name}`", fix
            )


def _related(event: SchedulerStep, step: Step) -> bool:
    return len(event.loops) <= len(step.loops) and same_turn(event, step) and bool(event.loops)
