"""Rule HS124: amp-dtype-default-mismatch."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity

CARD = Card(
    code="HS124",
    name="amp-dtype-default-mismatch",
    severity=Severity.ERROR,
    what="Autocast is opened without the dtype that the configuration asks for.",
    why=(
        "Without `dtype=` CUDA autocast runs FP16, also in the configuration that asks for bfloat16 and switches the scaler off."
    ),
    example="""\
import torch
from torch import nn


def train(model, loader, dtype="bfloat16", epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, dtype="bfloat16", epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=getattr(torch, dtype)):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
    unfixed=("How the option spells its precisions is for its program to say."),
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A training region on CUDA's default dtype in a program with an option for bfloat16."""
    option = next(story.told("bf16 option"), None)
    if option is None:
        return
    for event in trace.of(Backward):
        for region in event.forward_regions:
            if region.enabled and not region.dtype_given and region.dtype == "float16":
                yield Found(region.place, f"autocast uses FP16 by default, though `{option.detail}` can ask for bfloat16")
