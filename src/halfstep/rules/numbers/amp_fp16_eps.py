"""Rule HS114: amp-fp16-eps."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Numeric
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity

CARD = Card(
    code="HS114",
    name="amp-fp16-eps",
    severity=Severity.ERROR,
    what="A guard constant is too small for FP16.",
    why=("Constants below 6e-8 are zero in FP16: the division they guard is 0/0, which gives NaN. Compute this part in FP32."),
    example="""\
import torch
from torch import nn


def normalise(scores):
    low, high = scores.min(), scores.max()
    return (scores - low) / (high - low + 1e-8)


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(normalise(model(x)), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
    instead="""\
import torch
from torch import nn


def normalise(scores):
    scores = scores.float()
    low, high = scores.min(), scores.max()
    return (scores - low) / (high - low + 1e-8)


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(normalise(model(x)), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
    unfixed=("Which of the tensors before the guard should be cast to FP32 is for the author to say."),
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A denominator, root or logarithm guarded by a constant that FP16 cannot hold."""
    for event in trace.of(Numeric):
        if event.kind == "small-guard":
            yield Found(event.place, "the guard constant is zero in FP16")
