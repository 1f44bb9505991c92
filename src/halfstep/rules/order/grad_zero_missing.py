"""Rule HS301: grad-zero-missing."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Made, Ref
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import cleared_in, known_to_clear, optimizers, used_again, whole, windows

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
        if not whole(trace, optimizer) or optimizer.name == "engine" or trace.exception is not None:
            continue
        if trace.repeated and any(fact.detail == optimizer.name for fact in story.told("clearing")):
            continue  # a method that nothing here calls clears them
        first = _first(trace, story, optimizer)
        if first is not None and not (first.by_framework and not _clears_by_hand(trace)):
            message = f"the gradients of `{optimizer.name}` are never cleared"
            message = f"{message} in this loop" if optimizer in cleared_in(trace) else message
            yield Found(first.place, message, _fix(first, optimizer))


def _first(trace: Trace, story: Story, optimizer: Ref) -> Backward | None:
    if optimizer in cleared_in(trace):
        again = used_again(trace, optimizer)
        return again[0] if again is not None and not again[1] else None
    if known_to_clear(trace, story, optimizer):
        return None
    parts = [w for w in windows(trace, optimizer) if w.step is not None and w.backwards]
    return parts[0].backwards[0] if len(parts) >= 2 else None


def _clears_by_hand(trace: Trace) -> bool:
    """Whether the framework is Accelerate or Fabric, which leave clearing to the program."""
    return any(made.what.kind == "framework" for made in trace.of(Made))


def _fix(backward: Backward, optimizer: Ref) -> FixRequest | None:
    if backward.place is None or not optimizer.name:
        return None
    return FixRequest("zero-before", backward.place, optimizer.name)
