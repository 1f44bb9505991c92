"""Rule HS126: amp-read-scaled-grads."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import GradRead, HostRead
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity
from halfstep.rules.listening import hear

CARD = Card(
    code="HS126",
    name="amp-read-scaled-grads",
    severity=Severity.INFO,
    what="A loss or gradients are read while multiplied by the loss scale.",
    why=(
        "What is logged is up to 65536 times too large and jumps with the scale. Log the loss before scaling,"
        " gradients after `unscale_`."
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
            scaled = scaler.scale(loss)
            scaled.backward()
            print(scaled.item())
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
            scaled = scaler.scale(loss)
            scaled.backward()
            print(loss.item())
            scaler.step(optimizer)
            scaler.update()
""",
    unfixed=("What should be read, and whether something unscales later, depends on what the number is for."),
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Reads of scaled losses, and of gradients that are not unscaled."""
    for event, accounts in hear(trace):
        if isinstance(event, HostRead) and event.scaled:
            yield Found(event.place, "this loss is multiplied by the loss scale")
        elif isinstance(event, GradRead) and any(o in accounts and accounts[o].scaled for o in event.optimizers):
            yield Found(event.place, "these gradients are multiplied by the loss scale")
