"""Rule HS209: accum-double-division."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Clip
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import accumulation, optimizers

CARD = Card(
    code="HS209",
    name="accum-double-division",
    severity=Severity.ERROR,
    what="A loss is divided twice by the size of the window.",
    why=("The update is as many times too small. Divide in one place: here, in the caller, or in the framework."),
    example="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            (loss / accumulate).backward()
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
    """Two divisions by the size of the window on one loss, or one on the loss and one on the gradients."""
    for optimizer in optimizers(trace):
        way = accumulation(trace, optimizer)
        if way is None:
            continue
        by_gradient = [
            e.place for e in trace.of(Clip) if e.kind == "divide" and e.divisor is not None and e.divisor.value == way.size
        ]
        for backward in trace.of(Backward):
            mine = backward.divisors if optimizer in backward.optimizers else ()
            same = [
                d for d in mine if "accum" in d.tags or (d.value == way.size and not d.tags & {"parts", "batch size", "quotient"})
            ]
            if backward.reduction == "sum":  # its first divisor makes a mean of it
                same = same[next((i + 1 for i, d in enumerate(same) if "accum" not in d.tags), 0) :]
            if len(same) >= 2 or (same and by_gradient):
                fix = FixRequest("undivide", same[-1].place) if same[-1].place is not None else None
                place = same[-1].place if len(same) > 1 else by_gradient[0]
                yield Found(place, f"the loss is divided by the window of {way.size} a second time", fix)
