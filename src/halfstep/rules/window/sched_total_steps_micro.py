"""Rule HS405: sched-total-steps-micro."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Place, Ref, SchedulerStep, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import accumulation, windows

CARD = Card(
    code="HS405",
    name="sched-total-steps-micro",
    severity=Severity.WARNING,
    what="The scheduler's length counts micro-batches, but it moves once a window.",
    why=(
        "The planned end is never reached: the learning rate does not decay as meant. Divide by the size of "
        "the window, rounded up."
    ),
    example="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=epochs * len(loader))
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=epochs * len(loader) // accumulate)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A length in batches without division by the window, and one move for each step."""
    if trace.exception is not None:
        return
    for event in trace.of(SchedulerStep):
        way = accumulation(trace, event.optimizer) if event.optimizer is not None else None
        horizon = trace.fact(event.scheduler, "horizon")
        if (
            way is None
            or not isinstance(horizon, frozenset)
            or "loader" not in horizon
            or horizon & {"/accum", "accum", f"/{way.size}"}
        ):
            continue
        if _within_batches(trace, event.optimizer):
            continue
        moves = sum(e.scheduler == event.scheduler for e in trace.of(SchedulerStep))
        steps = sum(e.optimizer == event.optimizer for e in trace.of(Step))
        if moves == steps:
            site = trace.fact(event.scheduler, "site")
            made = trace.made(event.scheduler)
            place = made.place if made is not None else event.place
            far = (
                isinstance(site, Place)
                and trace.fact(event.scheduler, "class") == "LambdaLR"
                and made is not None
                and len(made.stack) > 1
            )
            step = next((e.place for e in trace.of(Step) if e.optimizer == event.optimizer), None)
            yield Found(
                made.stack[-2] if far and made else place,
                "the scheduler's length counts micro-batches, but it moves once a window",
                FixRequest("count-steps", place, other=step) if place is not None and step is not None else None,
            )
            return


def _within_batches(trace: Trace, optimizer: Ref | None) -> bool:
    """Whether every window is one batch of a loader that is cut into parts: the loader then counts windows."""
    whole = [w for w in windows(trace, optimizer) if w.step is not None and w.backwards] if optimizer is not None else []
    return all(
        w.step is not None
        and w.step.loops[-1:]
        and w.step.loops[-1].over == "loader"
        and all(b.loops[: len(w.step.loops)] == w.step.loops for b in w.backwards)
        for w in whole
    )
