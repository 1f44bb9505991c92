"""Rule HS201: accum-no-loss-division."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Clip
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import accumulation, optimizers, windows

CARD = Card(
    code="HS201",
    name="accum-no-loss-division",
    severity=Severity.ERROR,
    what="Mean losses of several micro-batches are added up without division.",
    why=("The update is as many times too large as the window has micro-batches; clipping and a retuned learning rate hide it."),
    example="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y)
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
            loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Windows whose mean losses are not divided, and whose gradients are not either."""
    if trace.exception is not None:
        return
    for optimizer in optimizers(trace):
        way = accumulation(trace, optimizer)
        if way is None or not (way.guarded or way.counted) or any(e.kind == "divide" for e in trace.of(Clip)):
            continue
        for window in windows(trace, optimizer):
            turns = Counter(b.stack for b in window.backwards)
            for backward in window.backwards if window.step is not None and (window.size > 1 or way.wiped) else ():
                if (
                    (turns[backward.stack] > 1 or way.wiped)
                    and not backward.divisors
                    and backward.reduction in ("mean", "token_mean")
                ):
                    step = window.step.place if window.step is not None else None
                    fix = FixRequest("divide", backward.place, other=step) if backward.place is not None and step else None
                    yield Found(backward.place, f"the mean losses of {way.size} micro-batches are added up without division", fix)
