"""Rule HS208: accum-skip-breaks-window."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity
from halfstep.rules.listening import accumulation, optimizers, windows

CARD = Card(
    code="HS208",
    name="accum-skip-breaks-window",
    severity=Severity.WARNING,
    what="Skipping a bad micro-batch also skips the window's step.",
    why=("The next window is twice as long and mixes stale gradients. Decide the boundary outside of what is skipped."),
    example="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            if not torch.isfinite(loss):
                continue
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
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            if torch.isfinite(loss):
                loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
""",
    unfixed=("What of the turn should still happen for a bad micro-batch is for the author to say."),
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """With one bad micro-batch at the boundary, a window of nearly twice the size."""
    exception, usual = trace.exception, story.usual(trace)
    if exception is None or usual is None:
        return
    for optimizer in optimizers(usual):
        way = accumulation(usual, optimizer)
        if way is None or not way.guarded:
            continue
        largest = max((w.size for w in windows(usual, optimizer) if not w.crossed), default=0)
        if any(w.size > largest and not w.crossed and w.step is not None for w in windows(trace, optimizer)):
            yield Found(exception.place, "skipping this micro-batch skips the step of its window too")
