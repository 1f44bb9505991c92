"""Rule HS121: amp-pure-bf16-update-lost."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Place, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS121",
    name="amp-pure-bf16-update-lost",
    severity=Severity.WARNING,
    what="Parameters stored in bfloat16 are trained with an ordinary optimizer.",
    why=(
        "Updates smaller than 2^-9 of a weight are rounded away: norm weights hardly ever move. Keep FP32 "
        "parameters with autocast."
    ),
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    model.to(torch.bfloat16)
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
    """bfloat16 parameters in an optimizer that steps."""
    for event in trace.of(Step):
        for model in event.bf16_params:
            kind = str(trace.fact(event.optimizer, "class", ""))
            if kind in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax"):
                cast = trace.fact(model, "cast at")
                place = cast if isinstance(cast, Place) else event.place
                yield Found(
                    place,
                    f"`{model.name}` is trained with parameters stored in bfloat16: small updates are rounded away",
                    FixRequest("keep-fp32", place, model.name) if place is not None else None,
                )
