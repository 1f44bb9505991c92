"""Rule HS113: amp-bce-under-autocast."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Loss
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS113",
    name="amp-bce-under-autocast",
    severity=Severity.ERROR,
    what="`BCELoss` or `binary_cross_entropy` runs inside a CUDA autocast region.",
    why=(
        "It is on autocast's list of unsafe operations and raises. Return logits and use the `with_logits` "
        "form, or leave autocast for the loss."
    ),
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.BCELoss()
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(torch.sigmoid(model(x)), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.BCEWithLogitsLoss()
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A plain binary cross entropy in an enabled region that is not the CPU's."""
    for event in trace.of(Loss):
        region = event.region
        if event.criterion in ("BCELoss", "binary_cross_entropy") and region is not None and region.device != "cpu":
            fix = FixRequest("with-logits", event.place) if event.place is not None else None
            yield Found(event.place, f"`{event.criterion}` raises inside a CUDA autocast region", fix)
