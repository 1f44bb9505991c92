"""Rule HS401: opt-missing-params."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Made, ModuleReplaced, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import call_site

CARD = Card(
    code="HS401",
    name="opt-missing-params",
    severity=Severity.ERROR,
    what="A module is put into the model after the optimizer was built, or is in no optimizer at all.",
    why="Its parameters are in no optimizer: they get gradients and never move.",
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.head = nn.Linear(8, 2)
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
    model.head = nn.Linear(8, 2)
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
    """A replaced module whose parameters no optimizer gets before the optimizers step, or one that is in none at all."""
    replaced = list(_replaced(trace))
    yield from replaced
    if not replaced and trace.exception is None:
        yield from _left_out(trace)


def _left_out(trace: Trace) -> Iterator[Found]:
    for backward in trace.of(Backward):
        step = next((s for s in trace.of(Step) if s.serial > backward.serial and s.optimizer in backward.optimizers), None)
        made = trace.made(step.optimizer) if step is not None else None
        if backward.apart and made is not None:
            for place in backward.apart:
                yield Found(place, "a plain list, tuple or dict hides these layers from `parameters()`: they are not trained")
            return
        if backward.untrained and made is not None:
            names = " and ".join(dict.fromkeys(f"`{m.name or 'a layer'}`" for m in backward.untrained[:3]))
            yield Found(made.place, f"{names} gets gradients and is in no optimizer: it is not trained")
            return


def _replaced(trace: Trace) -> Iterator[Found]:
    for event in trace.of(ModuleReplaced):
        later = [s for s in trace.of(Step) if s.serial > event.serial]
        stepped = {s.optimizer for s in later}
        made_later = [m for m in trace.of(Made) if m.what.kind == "optimizer" and m.serial > event.serial]
        if stepped & set(event.optimizers) and not made_later:
            made = trace.made(next(iter(stepped & set(event.optimizers))))
            fix = FixRequest("move-after", made.place, other=event.place) if made is not None and made.place is not None else None
            if event.module == event.model:
                yield Found(call_site(event, made), f"`{event.module.name}` is trained from here on, but is in no optimizer")
                continue
            yield Found(
                event.place,
                f"`{event.module.name}` is put into `{event.model.name}` after the optimizer was built: it is not trained",
                fix,
            )
