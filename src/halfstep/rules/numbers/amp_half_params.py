"""Rule HS110: amp-half-params."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Event, Place, Ref, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS110",
    name="amp-half-params",
    severity=Severity.ERROR,
    what="Parameters that are trained are stored in FP16.",
    why=(
        "`GradScaler` refuses FP16 gradients; without it Adam's epsilon is 0 in FP16 and most updates are "
        "rounded away. Keep FP32 parameters and let autocast choose."
    ),
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    model = model.half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
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
    """FP16 parameters in an optimizer that steps, or in a loss of which an optimizer gets the gradients."""
    for event in trace.of(Step, Backward):
        for model in event.half_params:
            if isinstance(event, Step) or (event.optimizers and not event.by_framework):
                place = _place(trace, model, event)
                fix = FixRequest("keep-fp32", place, model.name) if place is not None else None
                yield Found(place, f"`{model.name}` is trained with parameters stored in FP16", fix)


def _place(trace: Trace, model: Ref, event: Event) -> Place | None:
    cast = trace.fact(model, "cast at")
    return cast if isinstance(cast, Place) else event.place
