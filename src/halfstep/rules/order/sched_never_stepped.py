"""Rule HS412: sched-never-stepped."""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Made, SchedulerStep, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity

CARD = Card(
    code="HS412",
    name="sched-never-stepped",
    severity=Severity.WARNING,
    what="A scheduler is built and never moved.",
    why="The learning rate stays where it starts.",
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        scheduler.step()
""",
    unfixed=("Whether its length counts updates or epochs is not known, and so where it should move."),
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A scheduler that moves in no world though its optimizer steps in this one."""
    moved = {e.scheduler.place for t in story.traces for e in t.of(SchedulerStep)}
    parts = {m.what for m in trace.of(Made) if m.facts.get("part of") is not None}
    for made in trace.of(Made):
        if made.what.kind != "scheduler" or made.what.escaped or made.what in parts or made.place in moved:
            continue
        if any(fact.detail == made.what.name for fact in story.told("periodic step")) or _moved_unheard(story, made.what.name):
            continue
        steps = [s for s in trace.of(Step) if s.optimizer == made.facts.get("optimizer") and s.serial > made.serial]
        if len(steps) >= 2 and not any(e.scheduler.given for e in trace.of(SchedulerStep)):
            yield Found(made.place, f"`{made.what.name or made.facts.get('class')}` is never stepped")


_SCHEDULER = re.compile(r"sched|^lr_?s?$", re.I)


def _moved_unheard(story: Story, name: str) -> bool:
    """Whether the text moves a scheduler of this name (of any, where it has none of its own) at a place that no run came to."""
    heard = {e.place.line for trace in story.traces for e in trace.of(SchedulerStep, Step) if e.place is not None}
    named = (fact for fact in story.told("stepping") if fact.place.line not in heard)
    return any(fact.detail == name or (not name and _SCHEDULER.search(fact.detail)) for fact in named)
