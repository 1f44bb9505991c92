"""Rule HS115: amp-fp16-mask-overflow."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Numeric
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS115",
    name="amp-fp16-mask-overflow",
    severity=Severity.ERROR,
    what="A mask fill does not fit FP16.",
    why=("FP16 ends at 65504: filling with -1e9 raises, or gives -inf and rows of NaN. Use `torch.finfo(x.dtype).min`."),
    example="""\
import torch
from torch import nn


def attend(q, k, mask):
    scores = q @ k.transpose(-2, -1)
    return scores.masked_fill(mask, -1e9).softmax(-1)


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                hidden = model(x)
                loss = nn.functional.mse_loss(attend(hidden, hidden, x > 0), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
    instead="""\
import torch
from torch import nn


def attend(q, k, mask):
    scores = q @ k.transpose(-2, -1)
    return scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(-1)


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                hidden = model(x)
                loss = nn.functional.mse_loss(attend(hidden, hidden, x > 0), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Fills beyond FP16's range on FP16 tensors."""
    for event in trace.of(Numeric):
        if event.kind == "mask-overflow":
            fix = FixRequest("finfo", event.place) if event.place else None
            yield Found(event.place, "the fill value does not fit FP16 (largest 65504)", fix)
