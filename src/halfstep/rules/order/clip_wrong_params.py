"""Rule HS306: clip-wrong-params."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Clip, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity

CARD = Card(
    code="HS306",
    name="clip-wrong-params",
    severity=Severity.ERROR,
    what="The clip does not cover the parameters that the optimizer steps.",
    why=("A generator of parameters is empty after its first use, and a clip of one model leaves the others as they are."),
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    params = model.parameters()
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
""",
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Clips over a used-up generator, or over some of the models of the optimizer that steps next."""
    clips: list[Clip] = []
    for event in trace.events:
        if isinstance(event, Clip) and event.exhausted:
            yield Found(event.place, "this generator of parameters was used up before: nothing is clipped")
        elif isinstance(event, Clip) and event.kind in ("norm", "value"):
            clips.append(event)
        elif isinstance(event, Step):
            mine = [c for c in clips if event.optimizer in c.optimizers]
            partial = [c for c in mine if event.optimizer in c.partial]
            if len(mine) == 1 and len(partial) == 1:
                yield Found(partial[0].place, f"only some of the parameters of `{event.optimizer.name}` are clipped")
            clips = [c for c in clips if event.optimizer not in c.optimizers]
