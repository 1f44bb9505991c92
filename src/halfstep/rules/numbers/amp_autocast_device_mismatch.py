"""Rule HS123: amp-autocast-device-mismatch."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Forward
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS123",
    name="amp-autocast-device-mismatch",
    severity=Severity.WARNING,
    what="The autocast region names another device than the model's.",
    why="On a machine where the device differs nothing is cast: the run is FP32 without a message.",
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device)
    scaler = torch.amp.GradScaler(device)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A training forward pass of a model on the CPU in a CUDA region, or the other way round."""
    if not trace.has(Backward):
        return
    for event in trace.of(Forward):
        region = event.region
        if (
            region is not None
            and event.device in ("cpu", "cuda")
            and region.device in ("cpu", "cuda")
            and region.device != event.device
        ):
            fix = FixRequest("device-of-model", region.place) if region.place is not None else None
            yield Found(region.place, f"autocast is for {region.device}, but the model is on {event.device}", fix)
