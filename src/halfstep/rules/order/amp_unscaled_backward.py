"""Rule HS107: amp-unscaled-backward."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import hear

CARD = Card(
    code="HS107",
    name="amp-unscaled-backward",
    severity=Severity.ERROR,
    what="A loss is backpropagated unscaled although its optimizer steps through the scaler.",
    why="Its gradients are divided by the scale before the step: they vanish.",
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
            loss.backward()
            scaler.step(optimizer)
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
    """Unscaled gradients at a step through the scaler."""
    for event, accounts in hear(trace):
        if isinstance(event, Step) and event.scaler is not None and not event.closure:
            for backward in accounts[event.optimizer].pending:
                if backward.scaler is None and not backward.by_framework:
                    yield Found(
                        backward.place,
                        f"this loss is not scaled, but `{event.optimizer.name}` steps through the scaler",
                        _fix(backward, event),
                    )


def _fix(backward: Backward, step: Step) -> FixRequest | None:
    if backward.place is None or step.scaler is None or not step.scaler.name:
        return None
    return FixRequest("scale-loss", backward.place, step.scaler.name)
