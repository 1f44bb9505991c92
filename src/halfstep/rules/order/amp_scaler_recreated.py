"""Rule HS118: amp-scaler-recreated."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Place, Ref, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS118",
    name="amp-scaler-recreated",
    severity=Severity.WARNING,
    what="A new loss scaler is made for every epoch or step.",
    why=("The learned scale is thrown away: the first steps of every epoch are skipped until it has settled again."),
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        scaler = torch.amp.GradScaler("cuda")
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
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
    """One optimizer that steps through several scalers made at the same place."""
    used: dict[Ref, dict[Place, set[int]]] = {}
    for event in trace.of(Step):
        scaler = event.scaler
        if scaler is not None and scaler.place is not None and not scaler.given:
            numbers = used.setdefault(event.optimizer, {}).setdefault(scaler.place, set())
            numbers.add(scaler.number)
            if len(numbers) > 1:
                yield Found(scaler.place, "the loss scaler is made anew and forgets its scale", FixRequest("hoist", scaler.place))
