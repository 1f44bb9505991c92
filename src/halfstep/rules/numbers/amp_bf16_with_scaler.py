"""Rule HS112: amp-bf16-with-scaler."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS112",
    name="amp-bf16-with-scaler",
    severity=Severity.INFO,
    what="A loss scaler is enabled with bfloat16.",
    why=("bfloat16 has the range of FP32: scaling gains nothing, costs a check for inf per step, and may skip steps silently."),
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
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
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A scaled loss whose regions are all bfloat16."""
    for event in trace.of(Backward):
        regions = [r for r in event.forward_regions if r.enabled]
        if event.scaler is not None and regions and all(r.dtype == "bfloat16" for r in regions):
            place = event.scaler.place or regions[0].place
            fix = FixRequest("keyword", event.scaler.place, "enabled=False") if event.scaler.place else None
            yield Found(place, "the loss scaler is enabled although autocast uses bfloat16", fix)
