"""Rule HS305: clip-before-backward."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Clip, Ref, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import hear, same_turn

CARD = Card(
    code="HS305",
    name="clip-before-backward",
    severity=Severity.ERROR,
    what="Gradients are clipped before the backward pass fills them.",
    why="The clip sees empty or stale gradients; the step runs with unclipped ones.",
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            loss.backward()
            optimizer.step()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A clip without gradients of this turn, then a backward pass and a step without a clip."""
    early: dict[Ref, Clip] = {}
    filled: dict[Ref, Backward] = {}
    for event, accounts in hear(trace):
        if isinstance(event, Clip):
            for optimizer in event.optimizers:
                early.pop(optimizer, None)
                step = accounts[optimizer].step
                after_step = step is not None and accounts[optimizer].held and same_turn(step, event)
                if not accounts[optimizer].pending and not after_step and event.kind not in ("divide", "edit", "set"):
                    early[optimizer] = event
        elif isinstance(event, Backward):
            filled.update({o: event for o in event.optimizers if o in early and same_turn(early[o], event)})
        elif isinstance(event, Step):
            if event.optimizer in early and event.optimizer in filled and not event.closure:
                place, last = early[event.optimizer].place, filled[event.optimizer].place
                fix = FixRequest("move-after", place, other=last) if place is not None and last is not None else None
                yield Found(place, "gradients are clipped before the backward pass fills them", fix)
            early.pop(event.optimizer, None)
            filled.pop(event.optimizer, None)
