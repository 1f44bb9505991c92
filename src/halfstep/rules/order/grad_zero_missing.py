"""Rule HS301: grad-zero-missing."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Ref
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import known_to_clear, optimizers, whole, windows

CARD = Card(
    code="HS301",
    name="grad-zero-missing",
    severity=Severity.ERROR,
    what="An optimizer's gradients are never cleared.",
    why="Every step uses the sum of all gradients since the start.",
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
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
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """An optimizer that steps again and again and is not cleared in any world."""
    for optimizer in optimizers(trace):
        if not whole(trace, optimizer) or optimizer.name == "engine" or known_to_clear(trace, story, optimizer):
            continue
        parts = [w for w in windows(trace, optimizer) if w.step is not None and w.backwards]
        if len(parts) >= 2 and not any(b.by_framework for w in parts for b in w.backwards):
            fix = _fix(parts[0].backwards[0], optimizer)
            yield Found(parts[0].backwards[0].place, f"the gradients of `{optimizer.name}` are never cleared", fix)


def _fix(backward: Backward, optimizer: Ref) -> FixRequest | None:
    if backward.place is None or not optimizer.name:
        return None
    return FixRequest("zero-before", backward.place, optimizer.name)
