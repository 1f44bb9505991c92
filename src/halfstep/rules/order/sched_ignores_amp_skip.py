"""Rule HS415: sched-ignores-amp-skip."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import ScaleRead, SchedulerStep, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import same_turn

CARD = Card(
    code="HS415",
    name="sched-ignores-amp-skip",
    severity=Severity.INFO,
    what="The scheduler also moves when the scaler skipped the step.",
    why=(
        "During the first steps the scale is found by skipping: warm-up runs ahead of the optimizer. Compare "
        "the scale before and after `update()`."
    ),
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                scheduler.step()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A move right after a scaled step, with the scale not looked at."""
    step: Step | None = None
    looked = False
    for event in trace.of(Step, ScaleRead, SchedulerStep):
        if isinstance(event, Step):
            step, looked = (event if event.scaler is not None else None), False
        elif isinstance(event, ScaleRead):
            looked = True
        elif step is not None and not looked and same_turn(step, event) and len(step.loops) == len(event.loops):
            fix = FixRequest("unless-skipped", event.place, other=step.place) if event.place and step.place else None
            yield Found(event.place, f"`{event.scheduler.name}` also moves when the scaler skipped the step", fix)
