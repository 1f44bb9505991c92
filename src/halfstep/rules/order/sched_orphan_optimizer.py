"""Rule HS410: sched-orphan-optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Place, Ref, SchedulerStep, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS410",
    name="sched-orphan-optimizer",
    severity=Severity.ERROR,
    what="The scheduler still drives an optimizer that was replaced.",
    why="The new optimizer's learning rate never changes.",
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
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
    """A move of a scheduler whose optimizer does not step any more, while one of the same name does."""
    for event in {e.scheduler: e for e in trace.of(SchedulerStep)}.values():
        old = event.optimizer
        if old is None or old.given:
            continue
        later = {s.optimizer for s in trace.of(Step) if s.serial < event.serial}
        newer = [o for o in later if o.number > old.number and o.name == old.name and o.number > event.scheduler.number]
        still = any(s.optimizer == old and s.serial > event.serial for s in trace.of(Step))
        renewed = [s for s in trace.of(SchedulerStep) if s.optimizer in newer]
        if newer and not still and not renewed:
            made = trace.made(event.scheduler)
            fix = FixRequest("move-after", made.place, other=newer[0].place) if made is not None and made.place else None
            yield Found(
                _asked(trace, newer[0], old), f"`{event.scheduler.name}` still drives the `{old.name}` that is replaced here", fix
            )
            return


def _asked(trace: Trace, new: Ref, old: Ref) -> Place | None:
    """Where the new optimizer is asked for: not in the helper that makes both."""
    mine, other = trace.made(new), trace.made(old)
    made_alike = mine is not None and other is not None and mine.place == other.place and len(mine.stack) > 1
    return mine.stack[-2] if made_alike and mine is not None else new.place
