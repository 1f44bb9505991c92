"""Rule HS210: accum-state-per-micro."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import AverageUpdate, Backward, Ref, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Safety, Severity
from halfstep.rules.listening import accumulation, call_site, into_window, optimizers

CARD = Card(
    code="HS210",
    name="accum-state-per-micro",
    severity=Severity.WARNING,
    what="An average of weights is updated on every micro-batch.",
    why="Its horizon is as many times shorter than configured, because the weights change once a window.",
    example="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ema = torch.optim.swa_utils.AveragedModel(model)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
            ema.update_parameters(model)
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ema = torch.optim.swa_utils.AveragedModel(model)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
                ema.update_parameters(model)
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Two updates of an average with backward passes between, and no step."""
    ways = [
        way for way in (accumulation(trace, o) for o in optimizers(trace)) if way is not None and (way.guarded or way.counted)
    ]
    if not ways:
        return
    last: dict[Ref, AverageUpdate] = {}
    backward: Backward | None = None
    for event in trace.events:
        if isinstance(event, Step):
            last.clear()
        elif isinstance(event, Backward):
            backward = event
        elif isinstance(event, AverageUpdate) and backward is not None:
            if event.target in last and backward.serial > last[event.target].serial:
                fix = into_window(trace, event, next(o for o in optimizers(trace) if accumulation(trace, o)))
                yield Found(
                    call_site(event, backward), "the average of weights is updated on micro-batches that do not step", fix
                )
            last[event.target] = event
