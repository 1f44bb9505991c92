"""Rule HS103: amp-unscale-before-backward."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Ref, ScalerUpdate, Step, Unscale
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS103",
    name="amp-unscale-before-backward",
    severity=Severity.ERROR,
    what="`unscale_` runs before the backward pass whose gradients it should divide.",
    why=("The scaler marks the optimizer as unscaled, so the step uses gradients that are still multiplied by the scale."),
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.unscale_(optimizer)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """An unscale, followed by a scaled backward before the step or the scaler's next unscale or update."""
    early: dict[Ref, Unscale] = {}
    filled: dict[Ref, Backward] = {}
    for event in trace.of(Unscale, Backward, ScalerUpdate, Step):
        if isinstance(event, Unscale):
            early[event.optimizer] = event
            filled.pop(event.optimizer, None)
        elif isinstance(event, ScalerUpdate):
            for optimizer in [o for o, unscale in early.items() if unscale.scaler == event.scaler]:
                del early[optimizer]
                filled.pop(optimizer, None)
        elif isinstance(event, Backward) and event.scaler is not None:
            filled.update({o: event for o in event.optimizers if o in early})
        elif isinstance(event, Step):
            if event.optimizer in filled and event.scaler is not None:
                place, last = early[event.optimizer].place, filled[event.optimizer].place
                fix = FixRequest("move-after", place, other=last) if place is not None and last is not None else None
                yield Found(place, f"`unscale_` of `{event.optimizer.name}` runs before its backward pass", fix)
            early.pop(event.optimizer, None)
            filled.pop(event.optimizer, None)
