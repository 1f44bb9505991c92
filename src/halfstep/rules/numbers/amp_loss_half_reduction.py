"""Rule HS116: amp-loss-half-reduction."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Numeric
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS116",
    name="amp-loss-half-reduction",
    severity=Severity.ERROR,
    what="FP16 outputs leave autocast and are squared or summed in FP16.",
    why=(
        "Outside the region operations run in the dtype of their inputs: sums beyond 65504 become inf and "
        "squares lose their precision. Cast with `.float()` first."
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
                out = model(x)
            loss = (out**2).sum()
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
                out = model(x)
            loss = (out.float() ** 2).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Reductions of FP16 outputs outside of the region that made them."""
    for event in trace.of(Numeric):
        if event.kind == "half-reduction":
            fix = FixRequest("to-float", event.place) if event.place is not None else None
            yield Found(event.place, f"`{event.detail}` runs in FP16, outside of the autocast region that made its input", fix)
