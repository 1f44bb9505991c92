"""Rule HS104: amp-missing-update."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Event, Ref, Step, Unscale, ZeroGrad
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import hear, same_turn, whole

CARD = Card(
    code="HS104",
    name="amp-missing-update",
    severity=Severity.ERROR,
    what="`scaler.update()` is missing on a path that unscaled or stepped.",
    why=(
        "The scaler keeps the optimizer's state until `update()`: the next `unscale_` or `step` raises, and "
        "the scale never adapts."
    ),
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
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A scaled step or unscale for which the state of the last one was never reset."""
    last: dict[Ref, Event] = {}
    for event, accounts in hear(trace):
        if isinstance(event, (Step, Unscale)) and event.scaler is not None and whole(trace, event.scaler):
            before = accounts[event.optimizer].not_updated
            zero = accounts[event.optimizer].zero
            renewed = isinstance(before, Step) or (zero is not None and before is not None and zero.serial > before.serial)
            same = before is not None and same_turn(before, event)
            if before is not None and renewed and not (same and event.loops):
                yield Found(
                    last.get(event.optimizer, before).place, "`scaler.update()` does not follow on this path", _fix(before)
                )
        if isinstance(event, (Step, Unscale)):
            last[event.optimizer] = event
        elif isinstance(event, ZeroGrad):
            last.update({o: event for o in event.optimizers if o in last and same_turn(last[o], event)})


def _fix(before: Event) -> FixRequest | None:
    if not isinstance(before, Step) or before.place is None or before.scaler is None or not before.scaler.name:
        return None
    return FixRequest("update-after", before.place, before.scaler.name)
