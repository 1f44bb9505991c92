"""Rule HS111: amp-fp16-no-scaler."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import hear

CARD = Card(
    code="HS111",
    name="amp-fp16-no-scaler",
    severity=Severity.ERROR,
    what="FP16 autocast is trained without loss scaling.",
    why=("Gradients below 3e-8 become zero in FP16 without a message, and the loss flattens. Use `GradScaler`, or bfloat16."),
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
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
    """An unscaled loss of an FP16 region whose optimizer steps without a scaler."""
    scaled = {b.place for t in story.traces for b in t.of(Backward) if b.scaler is not None} if not trace.has(Backward) else set()
    for event, accounts in hear(trace):
        if not isinstance(event, Step) or event.scaler is not None:
            continue
        for backward in accounts[event.optimizer].pending:
            half = [r for r in backward.forward_regions if r.enabled and r.dtype == "float16"]
            by_hand = any(d.value is not None and d.value < 1 for d in backward.divisors)
            if half and not by_hand and backward.scaler is None and not backward.by_framework and backward.place not in scaled:
                place, device = half[0].place, half[0].device
                fix = FixRequest("scale", place, device) if place is not None and device else None
                yield Found(place, "FP16 autocast is trained without a GradScaler", fix)
