"""Rule HS123: amp-autocast-device-mismatch."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import AutocastEnter, AutocastExit, Backward, Forward, Made, Region
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
    open_regions: list[Region] = []
    scaler: Made | None = None
    within: Forward | None = None
    for event in trace.events:
        if isinstance(event, AutocastEnter):
            open_regions.append(event.region)
            if within is not None and event.stack[: len(within.stack)] == within.stack:
                yield from _compared(event.region, within)
        elif isinstance(event, AutocastExit) and open_regions:
            open_regions.pop()
        elif isinstance(event, Made) and event.facts.get("refused"):
            scaler = event
        elif isinstance(event, Forward):
            if scaler is not None and event.region is not None and event.region.dtype == "float16":
                yield Found(scaler.place, "the loss scaler is for a device that this machine lacks, and does nothing")
            refused = open_regions[-1] if open_regions and open_regions[-1].refused else None
            region = event.region or refused
            within = event
            yield from _compared(region, event)
    yield from _scaler_elsewhere(trace)


def _compared(region: Region | None, forward: Forward) -> Iterator[Found]:
    """A region that a forward pass runs in, or opens itself, against the model's device."""
    if region is not None and {forward.device, region.device} == {"cpu", "cuda"}:
        fix = FixRequest("device-of-model", region.place) if region.place is not None else None
        yield Found(region.place, f"autocast is for {region.device}, but the model is on {forward.device}", fix)


def _scaler_elsewhere(trace: Trace) -> Iterator[Found]:
    """A scaler that is said to be for CUDA, of a loss that was computed in FP16 on the CPU: it switches itself off."""
    for event in trace.of(Backward):
        made = trace.made(event.scaler) if event.scaler is not None else None
        half = [r for r in event.forward_regions if r.dtype == "float16" and r.device in (None, "cpu")]
        if made is None or made.place is None or made.facts.get("device") != "cuda" or not made.facts.get("said") or not half:
            continue
        models = set(event.models)
        if any(forward.model in models and forward.device == "cpu" for forward in trace.of(Forward)):
            said = "the scaler is for cuda, but the model is on cpu: it does nothing, and FP16 is not scaled"
            yield Found(made.place, said, FixRequest("device-of-model", made.place))
            return
