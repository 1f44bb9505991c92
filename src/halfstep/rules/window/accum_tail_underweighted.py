"""Rule HS204: accum-tail-underweighted."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Clip, Ref
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import Window, accumulation, call_site, optimizers, windows

CARD = Card(
    code="HS204",
    name="accum-tail-underweighted",
    severity=Severity.INFO,
    what="The shorter last window is stepped, but divided by the full window's size.",
    why="Its update is smaller than the others. Divide by the micro-batches that the window really has.",
    example="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            window = min(accumulate, len(loader) - i // accumulate * accumulate)
            loss = nn.functional.mse_loss(model(x), y) / window
            loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A stepped window smaller than the number its losses were divided by."""
    if trace.exception is not None:
        return
    for optimizer in optimizers(trace):
        way = accumulation(trace, optimizer)
        if way is None or not (way.guarded or way.counted):
            continue
        for window in windows(trace, optimizer):
            if window.step is None or window.size >= way.size:
                continue
            said = f"a window of {window.size} is divided by {way.size}"
            for backward in window.backwards:
                divided = next((d for d in backward.divisors if d.value == way.size), None)
                if divided is not None:
                    place = divided.place
                    fix = FixRequest("divide-by-window", place, other=window.step.place) if place is not None else None
                    yield Found(backward.place, said, fix)
            for clip in _between(trace, window, optimizer):
                if clip.divisor is not None and clip.divisor.value == way.size:
                    yield Found(call_site(clip, window.step), said)


def _between(trace: Trace, window: Window, optimizer: Ref) -> Iterator[Clip]:
    """What is done to the gradients of a window before its step."""
    first, last = (window.backwards[-1].serial, window.step.serial) if window.step and window.backwards else (0, 0)
    return (c for c in trace.of(Clip) if first < c.serial < last and optimizer in c.optimizers)
