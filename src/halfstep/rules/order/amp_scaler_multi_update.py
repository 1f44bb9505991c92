"""Rule HS119: amp-scaler-multi-update."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Place, Ref, ScalerUpdate, Step, ZeroGrad
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import hear

CARD = Card(
    code="HS119",
    name="amp-scaler-multi-update",
    severity=Severity.ERROR,
    what="`scaler.update()` runs while another optimizer still waits for its step.",
    why=(
        "If the first step overflowed, the second optimizer's gradients are divided by the new scale though "
        "they were multiplied by the old one."
    ),
    example="""\
import torch
from torch import nn


def train(model, other, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    second = torch.optim.AdamW(other.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            second.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(other(model(x)), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scaler.step(second)
            scaler.update()
""",
    instead="""\
import torch
from torch import nn


def train(model, other, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    second = torch.optim.AdamW(other.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            second.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(other(model(x)), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.step(second)
            scaler.update()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """An update between two steps whose backward passes both came before it."""
    early: dict[Ref, ScalerUpdate] = {}
    stepped: Ref | None = None
    for event, accounts in hear(trace):
        if isinstance(event, ScalerUpdate):
            waiting = [o for o, a in accounts.items() if any(b.scaler == event.scaler for b in a.pending)]
            early.update({o: event for o in waiting if stepped is not None and o != stepped})
            stepped = None
        elif isinstance(event, ZeroGrad):
            for optimizer in event.optimizers:
                early.pop(optimizer, None)
        elif isinstance(event, Backward):
            for optimizer in event.optimizers:
                if any(earlier.stack == event.stack for earlier in accounts[optimizer].pending):
                    early.pop(optimizer, None)
        elif isinstance(event, Step) and event.scaler is not None:
            if event.optimizer in early:
                early_at = early[event.optimizer].place
                message = f"the scale is updated while `{event.optimizer.name}` still waits for its step"
                yield Found(early_at, message, _fix(trace, event, early_at))
            early.pop(event.optimizer, None)
            stepped = event.optimizer


def _fix(trace: Trace, step: Step, early: Place | None) -> FixRequest | None:
    later = next((e.place for e in trace.of(ScalerUpdate) if e.serial > step.serial), None)
    return FixRequest("delete-early", early, other=later) if early is not None and later is not None else None
