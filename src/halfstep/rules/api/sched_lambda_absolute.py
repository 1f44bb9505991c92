"""Rule HS411: sched-lambda-absolute."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Made
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS411",
    name="sched-lambda-absolute",
    severity=Severity.ERROR,
    what="The function of a `LambdaLR` returns a learning rate instead of a factor.",
    why="The result is multiplied by the optimizer's learning rate: the rate is squared.",
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-3 * 0.99**step)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Schedules that return the base rate at their start, or a product with it."""
    for event in trace.of(Made):
        if event.what.kind == "scheduler" and event.facts.get("absolute"):
            fix = FixRequest("drop-factor", event.place) if event.place is not None else None
            what = "this function returns a learning rate; `LambdaLR` multiplies by it: return the factor only"
            yield Found(event.place, what, fix)
