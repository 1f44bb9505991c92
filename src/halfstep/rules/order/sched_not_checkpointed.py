"""Rule HS408: sched-not-checkpointed."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Load, Ref, Save, SchedulerStep
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS408",
    name="sched-not-checkpointed",
    severity=Severity.WARNING,
    what="A checkpoint holds the optimizer but not the scheduler.",
    why="After a resume the schedule starts anew.",
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
        scheduler.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
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
        state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save(state, "last.pt")
""",
    fix=Safety.SAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A saved optimizer state without the state of a scheduler that moves."""
    schedulers = {e.scheduler for e in trace.of(SchedulerStep) if not _placed(trace, e.scheduler)}
    if not schedulers:
        return
    yield from _not_loaded(trace, schedulers)
    for event in trace.of(Save):
        if "optimizer" in event.states and not event.states & {"scheduler", "?"}:
            move = next(e.place for e in trace.of(SchedulerStep))
            fix = (
                FixRequest("save-state", event.place, "scheduler", move)
                if event.place and move and len(schedulers) == 1
                else None
            )
            yield Found(
                event.written or event.place, "the checkpoint holds the optimizer but not the state of the scheduler", fix
            )


def _placed(trace: Trace, scheduler: Ref) -> bool:
    """Whether the program itself says where a scheduler is: by its last epoch, or by moves outside of the loops that train."""
    args = trace.fact(scheduler, "args")
    told = trace.fact(scheduler, "placed") is True or (isinstance(args, dict) and "last_epoch" in args)
    trained = {t.loop for b in trace.of(Backward) for t in b.loops}
    return told or any(
        trained and e.scheduler == scheduler and e.loops and not trained & {t.loop for t in e.loops}
        for e in trace.of(SchedulerStep)
    )


def _not_loaded(trace: Trace, schedulers: set[Ref]) -> Iterator[Found]:
    """An optimizer gets its state back, and its scheduler moves on without the state that was saved with it."""
    loads = [e for e in trace.of(Load) if e.target is not None]
    if any(e.target.kind == "scheduler" for e in loads if e.target):
        return
    saved = any("scheduler" in e.states for e in trace.of(Save))
    for load in (e for e in loads if saved or (e.handed_over and not trace.has(Save))):
        later = (e for e in trace.of(SchedulerStep) if e.serial > load.serial and e.scheduler in schedulers)
        mine = [trace.made(e.scheduler) for e in later if e.optimizer == load.target]
        if any(saved or (made is not None and made.serial < load.serial) for made in mine):
            yield Found(load.place, "the optimizer gets its saved state back here, its scheduler never does")
