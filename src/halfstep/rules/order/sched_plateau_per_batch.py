"""Rule HS407: sched-plateau-per-batch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import SchedulerStep, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity
from halfstep.rules.listening import in_loader_loop, same_turn

CARD = Card(
    code="HS407",
    name="sched-plateau-per-batch",
    severity=Severity.WARNING,
    what="`ReduceLROnPlateau` is stepped with every batch's loss.",
    why=(
        "Batch losses are noisy: its patience is used up within one epoch and the rate falls to nothing. Step"
        " once an epoch with the validation loss."
    ),
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step(loss.item())
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step(loss.item())
""",
    unfixed=("The metric of a whole epoch must be computed first."),
)


_SMOOTHED = re.compile(r"av(era)?ge?(_|\b)|mean(?!\()|smooth|running|window", re.I)
"""Names of a metric that is an average over many batches, on which a plateau can be seen with every batch."""


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """As many moves of a plateau scheduler as steps, in one loop with them."""
    for event in trace.of(SchedulerStep):
        if trace.fact(event.scheduler, "class") != "ReduceLROnPlateau" or not event.loops or "modulo" in event.guards:
            continue
        if _SMOOTHED.search(event.metric):
            continue
        moves = sum(e.scheduler == event.scheduler for e in trace.of(SchedulerStep))
        steps = [e for e in trace.of(Step) if e.optimizer == event.optimizer]
        inside = any(same_turn(event, s) and len(s.loops) == len(event.loops) >= 2 for s in steps)
        if inside and moves > 2 and moves >= len(steps) // 4 and _over_batches(event):
            yield Found(event.place, f"`{event.scheduler.name}` is stepped with every batch")
            return


def _over_batches(event: SchedulerStep) -> bool:
    """Whether the innermost loop is one over batches: of a loader, or a count within an epoch."""
    within_epoch = any("epochs" in turn.tags for turn in event.loops[:-1]) and "epochs" not in event.loops[-1].tags
    return in_loader_loop(event) or within_epoch
