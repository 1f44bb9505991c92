"""Rule HS109: amp-autocast-stale-cache."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import AutocastEnter, Forward, Numeric, Ref, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity
from halfstep.rules.listening import call_site

CARD = Card(
    code="HS109",
    name="amp-autocast-stale-cache",
    severity=Severity.ERROR,
    what="One autocast region spans optimizer steps.",
    why=(
        "The low-precision copies of the weights are cached until the region closes: later forward passes use"
        " the old weights and the loss does not change."
    ),
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
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
    unfixed=("The region must begin anew in every turn, around forward and loss: `halfstep convert` does that when it is gone."),
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A forward pass in the same region as an earlier step, or as weights that were written by hand after another one."""
    stepped: dict[int, Step | Numeric] = {}
    kept: set[tuple[int, Ref]] = set()
    entered = {event.region.number: event.place for event in trace.of(AutocastEnter)}
    for event in trace.events:
        region = event.region if isinstance(event, (Step, Numeric, Forward)) else None
        if region is None:
            continue
        if isinstance(event, Step) or (isinstance(event, Numeric) and event.kind == "weights written"):
            stepped[region.number] = event
        elif isinstance(event, Forward):
            change = stepped.get(region.number) if event.grad_enabled or (region.number, event.model) in kept else None
            kept |= {(region.number, event.model)} if event.grad_enabled else set()
            if isinstance(change, Step):
                opened = entered.get(region.number, region.place)
                message = "this autocast region stays open over optimizer steps: later forward passes use stale weights"
                yield Found(opened, message)
            elif change is not None:
                message = "weights change here and are used again in the same autocast region, which keeps copies of the old ones"
                yield Found(call_site(change, event), message)
