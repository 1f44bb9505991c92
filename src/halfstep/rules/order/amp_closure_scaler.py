"""Rule HS122: amp-closure-scaler."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Step
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity

CARD = Card(
    code="HS122",
    name="amp-closure-scaler",
    severity=Severity.ERROR,
    what="A closure is given to `scaler.step`.",
    why=(
        "The scaler cannot run closures (LBFGS, SAM) and raises. Use bfloat16 without a scaler, or an optimizer without closure."
    ),
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:

            def closure():
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                scaler.scale(loss).backward()
                return loss

            scaler.step(optimizer, closure)
            scaler.update()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:

            def closure():
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
""",
    unfixed=("Two ways are right: BF16 without a scaler, or an optimizer without a closure."),
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A step through the scaler with a closure, or of an optimizer that needs one."""
    for event in trace.of(Step):
        if event.scaler is not None and (event.closure or trace.fact(event.optimizer, "class") == "LBFGS"):
            yield Found(event.place, "`GradScaler.step` cannot run a closure")
