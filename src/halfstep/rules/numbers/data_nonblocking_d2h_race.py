"""Rule HS607: data-nonblocking-d2h-race."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import RacyRead
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS607",
    name="data-nonblocking-d2h-race",
    severity=Severity.ERROR,
    what="A copy to the host that may not have arrived is read.",
    why=("`non_blocking=True` towards the CPU returns at once: what is read may be old memory. Drop it, or synchronise first."),
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            out = model(x).to("cpu", non_blocking=True).numpy()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            out = model(x).to("cpu").numpy()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Reads of copies in flight."""
    for event in trace.of(RacyRead):
        fix = FixRequest("drop-keyword", event.copied, "non_blocking")
        yield Found(event.copied, "this copy to the host may not have arrived when it is read", fix)
