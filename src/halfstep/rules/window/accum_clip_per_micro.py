"""Rule HS207: accum-clip-per-micro."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Clip, Ref, Step, ZeroGrad
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Safety, Severity
from halfstep.rules.listening import accumulation, call_site, hear, into_window

CARD = Card(
    code="HS207",
    name="accum-clip-per-micro",
    severity=Severity.ERROR,
    what="Gradients are clipped after every micro-batch of a window.",
    why=("Clipping the partial sum distorts it: later micro-batches weigh more than earlier ones. Clip once, before the step."),
    example="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A clip after which more is added to the same gradients."""
    clipped: dict[Ref, Clip] = {}
    unscaled = {e.place for e, accounts in hear(trace) if isinstance(e, Clip) and any(accounts[o].unscaled for o in e.optimizers)}
    for event, accounts in hear(trace):
        if (
            isinstance(event, Clip)
            and event.kind not in ("divide", "set")
            and not event.exhausted
            and event.place not in unscaled
        ):
            clipped.update({o: event for o in event.optimizers if accounts[o].pending and accounts[o].unscaled is None})
        elif isinstance(event, (Step, ZeroGrad)):
            for optimizer in (event.optimizer,) if isinstance(event, Step) else event.optimizers:
                clipped.pop(optimizer, None)
        elif isinstance(event, Backward):
            for optimizer in event.optimizers:
                clip = clipped.get(optimizer)
                if clip is not None and any(b.stack == event.stack for b in accounts[optimizer].pending):
                    way = accumulation(trace, optimizer)
                    if way is not None and trace.exception is None:
                        yield Found(
                            call_site(clip, event),
                            "gradients are clipped on every micro-batch instead of once a window",
                            into_window(trace, clip, optimizer, "move-into-before"),
                        )
