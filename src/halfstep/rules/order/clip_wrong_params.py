"""Rule HS306: clip-wrong-params."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Clip, Step, ZeroGrad
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import concerned, same_turn

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
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Clips over a used-up generator, over some of the models of the optimizer that steps next, or over another's."""
    clips: list[Clip] = []
    for event in trace.events:
        if isinstance(event, Clip) and event.exhausted:
            fix = FixRequest("list-parameters", event.place) if event.place is not None else None
            yield Found(event.place, "this generator of parameters was used up before: nothing is clipped", fix)
        elif isinstance(event, Clip) and event.kind in ("norm", "value"):
            clips.append(event)
        elif isinstance(event, Step):
            mine = [c for c in clips if event.optimizer in c.optimizers]
            partial = [c for c in mine if event.optimizer in c.partial]
            if len(mine) == 1 and len(partial) == 1:
                yield Found(partial[0].place, f"only some of the parameters of `{event.optimizer.name}` are clipped")
            if not mine and clips and same_turn(clips[-1], event) and _meant(trace, clips[-1], event):
                yield Found(clips[-1].place, f"the parameters clipped here are not those of `{event.optimizer.name}`")
            clips = [c for c in clips if event.optimizer not in c.optimizers]


def _meant(trace: Trace, clip: Clip, step: Step) -> bool:
    """Whether a clip of others' parameters must have been meant for this step: theirs are cleared before they step."""
    before = [e for e in trace.of(Backward, ZeroGrad) if e.serial < clip.serial and step.optimizer in e.optimizers]
    after = (e for e in trace.of(Step, ZeroGrad, Backward) if e.serial > clip.serial)
    theirs = next((e for e in after if set(concerned(e)) & set(clip.optimizers)), None)
    return bool(before) and isinstance(before[-1], Backward) and isinstance(theirs, ZeroGrad) and bool(clip.optimizers)
