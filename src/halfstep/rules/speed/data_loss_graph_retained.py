"""Rule HS604: data-loss-graph-retained."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Fetch, Forward, Place, Retain, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import call_site

CARD = Card(
    code="HS604",
    name="data-loss-graph-retained",
    severity=Severity.ERROR,
    what="Tensors with their graphs are collected over steps.",
    why="Every graph stays in memory: use grows with each step until it ends. Detach what is kept.",
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
""",
    fix=Safety.SAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A container that gets graphs in several turns of a loop over batches, and is never backpropagated."""
    used = {number for b in trace.of(Backward) for number in b.retained}
    first: dict[int, Retain] = {}
    backward = next(iter(trace.of(Backward)), None)
    for event in trace.of(Retain) if backward is not None else ():
        if event.container in used or event.container not in first:
            first.setdefault(event.container, event)
            continue
        earlier = first[event.container]
        if _turns(trace, earlier, event):
            fix = FixRequest("detach", event.place) if event.place is not None else None
            yield Found(_site(trace, event, backward), f"a tensor with its graph is kept in `{event.name}` over steps", fix)


def _site(trace: Trace, event: Retain, backward: Backward | None) -> Place | None:
    """In the function that runs the forward pass, or the one that leads to the backward pass."""
    before = (trace.events[serial] for serial in range(event.serial - 1, -1, -1))
    trains = (e for e in before if isinstance(e, Backward) or (isinstance(e, Forward) and e.grad_enabled))
    return call_site(event, next(trains, backward))


def _turns(trace: Trace, earlier: Retain, event: Retain) -> bool:
    """Over steps, or over batches that nothing is backpropagated for; what is kept within a window is freed at its end."""
    between = {type(e) for e in trace.events[earlier.serial : event.serial]}
    return earlier.loops != event.loops and (Step in between or ({Fetch, Forward} <= between and Backward not in between))
