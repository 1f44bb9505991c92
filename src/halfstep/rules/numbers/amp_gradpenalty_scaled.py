"""Rule HS120: amp-gradpenalty-scaled."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity

CARD = Card(
    code="HS120",
    name="amp-gradpenalty-scaled",
    severity=Severity.ERROR,
    what="A gradient penalty is computed from gradients that are multiplied by the loss scale.",
    why=(
        "`torch.autograd.grad` of a scaled output returns scaled gradients: the penalty is thousands of times"
        " too large and jumps with the scale."
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
                loss = nn.functional.mse_loss(model(x), y)
            (grad,) = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)
            loss = loss + grad.float().norm()
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
            (grad,) = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)
            loss = loss + (grad.float() * (1.0 / scaler.get_scale())).norm()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
    unfixed=("Which of the gradients belong to the penalty, and in which power, is in the formula only."),
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A loss into which scaled gradients entered."""
    for event in trace.of(Backward):
        if event.scaled_penalty is not None:
            yield Found(event.scaled_penalty, "these gradients are multiplied by the loss scale and enter the loss undivided")
