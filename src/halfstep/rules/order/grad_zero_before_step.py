"""Rule HS303: grad-zero-before-step."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Clip, Ref, Step, ZeroGrad
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import hear, same_turn

CARD = Card(
    code="HS303",
    name="grad-zero-before-step",
    severity=Severity.ERROR,
    what="The gradients are cleared between the backward pass and the step.",
    why="The optimizer sees empty gradients: nothing is learned.",
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.zero_grad()
            optimizer.step()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A step without gradients, right after they were cleared in the same turn."""
    lost: dict[Ref, tuple[ZeroGrad, Backward]] = {}
    for event, accounts in hear(trace):
        if isinstance(event, ZeroGrad) and not event.partial:
            lost.update({o: (event, accounts[o].pending[-1]) for o in event.optimizers if accounts[o].pending})
        elif isinstance(event, Backward) or (isinstance(event, Clip) and event.kind in ("set", "edit", "divide")):
            for optimizer in event.optimizers:
                lost.pop(optimizer, None)
        elif isinstance(event, Step) and event.optimizer in lost and not event.closure:
            zero, backward = lost.pop(event.optimizer)
            if same_turn(zero, event) and same_turn(backward, event) and trace.exception is None:
                fix = FixRequest("move-after", zero.place, other=event.place) if zero.place and event.place else None
                yield Found(zero.place, f"`{event.optimizer.name}` steps right after its gradients were cleared", fix)
