"""Rule HS117: amp-scaler-not-checkpointed."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Load, Save, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS117",
    name="amp-scaler-not-checkpointed",
    severity=Severity.WARNING,
    what="A checkpoint holds the optimizer but not the loss scaler.",
    why="After a resume the scale starts at 65536 again and steps are skipped until it has settled.",
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, "last.pt")
""",
    fix=Safety.SAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A saved optimizer state without the state of a scaler that is in use."""
    scalers = {e.scaler for e in trace.of(Step) if e.scaler is not None}
    if not scalers or any(s.escaped for s in scalers):
        return
    incomplete = False
    for event in trace.of(Save):
        beside = frozenset().union(*(e.states for e in trace.of(Save) if e.stack[:-1] == event.stack[:-1]))
        if "optimizer" in event.states and "?" not in event.states and "scaler" not in beside:
            step = next(s.place for s in trace.of(Step) if s.scaler is not None)
            fix = FixRequest("save-state", event.place, "scaler", step) if event.place and step and len(scalers) == 1 else None
            place = event.written or event.place
            incomplete = True
            yield Found(place, "the checkpoint holds the optimizer but not the state of the loss scaler", fix)
    if not incomplete:
        yield from _never_restored(trace, story)


def _never_restored(trace: Trace, story: Story) -> Iterator[Found]:
    """The optimizer gets its saved state back and no path gives the scaler its own, though it is saved."""
    saved = any("scaler" in event.states for t in story.traces for event in t.of(Save))
    loads = [event.target.kind for t in story.traces for event in t.of(Load) if event.target is not None]
    begun = next((e.place for e in trace.of(Load) if e.target is not None and e.target.kind == "optimizer"), None)
    if saved and begun is not None and "scaler" not in loads:
        yield Found(begun, "the state of the loss scaler is saved and not restored with the optimizer's")
