"""Rule HS304: clip-after-step."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Clip, Event, Ref, Step, ZeroGrad
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
    """A clip of gradients that the step in the same turn has used, cleared or not."""
    emptied: dict[Ref, Step] = {}
    late: dict[Ref, tuple[Clip, Step]] = {}
    for event, accounts in hear(trace):
        if isinstance(event, ZeroGrad):
            emptied.update({o: step for o in event.optimizers if (step := accounts[o].step) is not None and accounts[o].held})
        elif isinstance(event, Backward):
            for optimizer in event.optimizers:
                emptied.pop(optimizer, None)
                if optimizer in late and _together(late[optimizer][0], event):
                    del late[optimizer]
        if not isinstance(event, Clip) or event.kind in ("divide", "edit", "set"):
            continue
        for optimizer in event.optimizers:
            account = accounts[optimizer]
            step = account.step
            if optimizer in emptied and _together(emptied[optimizer], event) and not account.pending:
                late.setdefault(optimizer, (event, emptied[optimizer]))
            if account.pending or not account.held or step is None or not same_turn(step, event):
                continue
            if _batches(step) == _batches(event) and not _clipped_before(trace, optimizer, account):
                yield _found(event, step, optimizer)
    for optimizer, (clip, step) in late.items():
        yield _found(clip, step, optimizer)


def _found(clip: Clip, step: Step, optimizer: Ref) -> Found:
    fix = FixRequest("move-before", clip.place, other=step.place) if clip.place and step.place else None
    return Found(clip.place, f"gradients are clipped after `{optimizer.name}` has used them", fix)


def _together(a: Event, b: Event) -> bool:
    """Whether two events belong to one batch, in whatever turn of a loop over parts (callbacks, optimizers)."""
    turns, others = ([turn for turn in event.loops if turn.over != "items"] for event in (a, b))
    return same_turn(a, b) or (bool(turns) and turns == others)


def _batches(event: Event) -> int:
    """How deep in loops over more than parts (optimizers, callbacks) an event happened."""
    return max((depth for depth, turn in enumerate(event.loops, 1) if turn.over != "items"), default=0)


def _clipped_before(trace: Trace, optimizer: Ref, account: Account) -> bool:
    start, end = account.held[0].serial, account.step.serial if account.step else 0
    return any(isinstance(e, Clip) and optimizer in e.optimizers for e in trace.events[start:end])
