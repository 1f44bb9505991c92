"""Rule HS108: amp-backward-in-autocast."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS108",
    name="amp-backward-in-autocast",
    severity=Severity.WARNING,
    what="The backward pass runs inside the autocast region.",
    why=(
        "Backward ops of your own are cast down again, compiled backward passes differ, and the cache of cast"
        " weights lives longer. Autocast belongs around forward and loss."
    ),
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(model(x), y)
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
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
""",
    fix=Safety.SAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Backward passes with autocast on."""
    for event in trace.of(Backward):
        if event.region is not None and not event.by_framework and event.place is not None:
            yield Found(event.place, "the backward pass runs under autocast", FixRequest("dedent-tail", event.place))
