"""Rule HS304: clip-after-step."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Clip, Event, Ref
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import Account, hear, same_turn

CARD = Card(
    code="HS304",
    name="clip-after-step",
    severity=Severity.ERROR,
    what="Gradients are clipped after the step has used them.",
    why="The step runs with unclipped gradients; the clip has no effect.",
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
    """A clip of gradients that the step in the same turn has used."""
    for event, accounts in hear(trace):
        if not isinstance(event, Clip) or event.kind in ("divide", "edit", "set"):
            continue
        for optimizer in event.optimizers:
            account = accounts[optimizer]
            step = account.step
            if account.pending or not account.held or step is None or not same_turn(step, event):
                continue
            if _batches(step) == _batches(event) and not _clipped_before(trace, optimizer, account):
                fix = FixRequest("move-before", event.place, other=step.place) if event.place and step.place else None
                yield Found(event.place, f"gradients are clipped after `{optimizer.name}` has used them", fix)


def _batches(event: Event) -> int:
    """How deep in loops over more than parts (optimizers, callbacks) an event happened."""
    return max((depth for depth, turn in enumerate(event.loops, 1) if turn.over != "items"), default=0)


def _clipped_before(trace: Trace, optimizer: Ref, account: Account) -> bool:
    start, end = account.held[0].serial, account.step.serial if account.step else 0
    return any(isinstance(e, Clip) and optimizer in e.optimizers for e in trace.events[start:end])
