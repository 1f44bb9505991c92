"""Rule HS701: mode-no-train-after-eval."""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Forward, Mode, Place, Ref
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import all_step, call_site

CARD = Card(
    code="HS701",
    name="mode-no-train-after-eval",
    severity=Severity.ERROR,
    what="After `eval()` in the loop, training goes on in evaluation mode.",
    why="From the second epoch on dropout is off and batch normalisation uses frozen statistics.",
    example="""\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))

    def forward(self, x):
        return self.body(x)


def train(loader, val_loader, epochs=2):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        model.eval()
        for x, y in val_loader:
            with torch.no_grad():
                total = nn.functional.mse_loss(model(x), y).item()
""",
    instead="""\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))

    def forward(self, x):
        return self.body(x)


def train(loader, val_loader, epochs=2):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        model.eval()
        for x, y in val_loader:
            with torch.no_grad():
                total = nn.functional.mse_loss(model(x), y).item()
        model.train()
""",
    fix=Safety.UNSAFE,
)

BESIDE = re.compile(r"(^|[._])(ref|reference|teacher|target|ema|reward)(_|$)", re.I)
"""Names of models that are meant to stay in evaluation mode beside the one that is trained."""


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Training in evaluation mode of a model that was trained in the other mode before, or was only just evaluated."""
    trained: set[Ref] = set()
    switched: dict[Ref, Mode] = {}
    for event in trace.of(Mode, Backward, Forward):
        if isinstance(event, Mode):
            switched.pop(event.model, None)
            if not event.training:
                switched[event.model] = event
        elif isinstance(event, Forward):
            trained |= {event.model} & set(switched) if not event.grad_enabled else set()
        elif all_step(trace, event):
            trained.update(m for m in event.models if m not in event.eval_mode)
            for model in event.eval_mode:
                mode = switched.get(model) or next(iter(switched.values()), None)
                if mode is not None and model in trained and mode.loops and not BESIDE.search(model.name):
                    yield _found(trace, event, model, mode)


def _found(trace: Trace, backward: Backward, model: Ref, mode: Mode) -> Found:
    """At the training pass in the wrong mode; where another function set the mode and left it, at what set it."""
    before = (f for f in reversed(list(trace.of(Forward))) if f.serial < backward.serial and f.model == model)
    forward = next((f for f in before if f.grad_enabled and not f.training), None)
    if forward is not None and forward.stack[:-1] != mode.stack[:-1]:
        name = f"`{model.name}`" if model.name else "the model"
        called = f"the call in line {_line(call_site(mode, forward))} leaves {name} in evaluation mode here"
        return Found(mode.place, f"{called}, and line {_line(forward.place)} trains in it", _fix(forward, mode))
    missing = f"`{model.name}.train()`" if model.name else "`train()`"
    what = f"this trains in evaluation mode, which line {_line(mode.place)} set: {missing} is missing before it"
    return Found(forward.place if forward is not None else call_site(mode, backward), what, _fix(forward, mode))


def _line(place: Place | None) -> int | str:
    return place.line if place is not None else "?"


def _fix(forward: Forward | None, mode: Mode) -> FixRequest | None:
    """To set the mode before the loop over batches, or before the pass itself where the mode is set in that loop."""
    loop = next((t for t in reversed(forward.loops) if t.over == "loader"), None) if forward is not None else None
    if forward is None or loop is None:
        return None
    within = any(turn.loop == loop.loop for turn in mode.loops)
    place = forward.place if within else loop.place
    return FixRequest("train", place, other=forward.place) if place is not None else None
