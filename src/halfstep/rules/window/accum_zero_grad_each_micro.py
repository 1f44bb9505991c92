"""Rule HS202: accum-zero-grad-each-micro."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Clip, ZeroGrad
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Safety, Severity
from halfstep.rules.listening import accumulation, hear, into_window, optimizers, windows

CARD = Card(
    code="HS202",
    name="accum-zero-grad-each-micro",
    severity=Severity.ERROR,
    what="The gradients are cleared for every micro-batch of a window.",
    why="Only the last micro-batch of each window counts: what was accumulated is erased.",
    example="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
""",
    instead="""\
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
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Clearing between two micro-batches of one window."""
    if trace.exception is not None:
        return
    for optimizer in optimizers(trace):
        way = accumulation(trace, optimizer)
        if way is None or not way.wiped or any(optimizer in e.optimizers and e.divisor is None for e in _written(trace)):
            continue
        stepped = {b.stack for w in windows(trace, optimizer) if w.step for b in w.backwards}
        for event, accounts in hear(trace):
            if isinstance(event, ZeroGrad) and optimizer in event.optimizers:
                lost = [b for b in accounts[optimizer].pending if b.stack in stepped and b.loops and event.loops]
                if any(b.loops[-1].loop in {t.loop for t in event.loops} for b in lost):
                    yield Found(
                        event.place,
                        f"`{optimizer.name}` loses the gradients of the micro-batches before: clear once a window",
                        into_window(trace, event, optimizer),
                    )


def _written(trace: Trace) -> list[Clip]:
    """Where the script writes gradients of its own, which it may have added up elsewhere."""
    return [event for event in trace.of(Clip) if event.kind == "divide"]
