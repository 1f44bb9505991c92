"""Rule HS106: amp-step-bypass."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Clip, Event, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import hear

CARD = Card(
    code="HS106",
    name="amp-step-bypass",
    severity=Severity.ERROR,
    what="`optimizer.step()` is called on scaled gradients, or in addition to `scaler.step`.",
    why=(
        "The learning rate is effectively multiplied by the scale and overflows are not skipped; in addition "
        "to `scaler.step` the same gradients are applied twice."
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
            optimizer.step()
            scaler.update()
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
    """A plain step with gradients of a scaled loss."""
    for event, accounts in hear(trace):
        if not isinstance(event, Step) or event.scaler is not None:
            continue
        account = accounts[event.optimizer]
        if account.scaled and not any(
            isinstance(e, Clip) and e.kind == "divide" for e in _since(trace, account.pending[0].serial, event.serial)
        ):
            yield Found(
                event.place,
                f"`{event.optimizer.name}.step()` uses gradients multiplied by "
                f"the loss scale; call `scaler.step({event.optimizer.name})`",
            )
        elif account.pending and account.unscaled is not None and not account.unscaled.scaler.escaped | ("data" in event.guards):
            yield Found(
                event.place,
                f"`{event.optimizer.name}.step()` does not skip overflows as `scaler.step({event.optimizer.name})` does",
            )
        elif not account.pending and account.step is not None and account.step.scaler is not None and account.held:
            fix = FixRequest("delete", event.place) if event.place else None
            yield Found(
                event.place, f"`{event.optimizer.name}` steps a second time with the gradients that `scaler.step` used", fix
            )


def _since(trace: Trace, start: int, end: int) -> tuple[Event, ...]:
    return trace.events[start:end]
