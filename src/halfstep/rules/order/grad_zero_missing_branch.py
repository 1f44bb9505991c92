"""Rule HS302: grad-zero-missing-branch."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Place, Ref
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import accumulation, alike, cleared_in, known_to_clear, optimizers, used_again, whole, windows

CARD = Card(
    code="HS302",
    name="grad-zero-missing-branch",
    severity=Severity.ERROR,
    what="The gradients are cleared in one branch only.",
    why="In the other configuration every step uses the sum of all gradients since the start.",
    example="""\
import torch
from torch import nn


def train(model, loader, use_amp=False, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            if use_amp:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = nn.functional.mse_loss(model(x), y)
            else:
                loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, use_amp=False, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            if use_amp:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = nn.functional.mse_loss(model(x), y)
            else:
                loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """An optimizer that is cleared in some worlds but not in this one."""
    here = cleared_in(trace)
    for optimizer in optimizers(trace):
        if not known_to_clear(trace, story, optimizer) or not whole(trace, optimizer) or trace.exception is not None:
            continue
        again = used_again(trace, optimizer)
        if optimizer in here or (again is not None and again[1]):
            first = again[0] if again is not None and again[1] else None
        else:
            parts = [w for w in windows(trace, optimizer) if w.step is not None and w.backwards]
            first = parts[0].backwards[0] if len(parts) >= 2 else None
        if first is not None:
            message = f"the gradients of `{optimizer.name}` are not cleared on this path"
            yield Found(first.place, message, _fix(story, first.place, optimizer))


def _fix(story: Story, backward: Place | None, optimizer: Ref) -> FixRequest | None:
    """To clear before the backward pass, where no path accumulates."""
    twins = [(t, o) for t in story.traces for o in optimizers(t) if alike(o) == alike(optimizer)]
    single = all(len([b for b in w.backwards if b.place == backward]) < 2 for t, o in twins for w in windows(t, o) if w.wiped)
    single = single and not any(accumulation(t, o) for t, o in twins)
    return FixRequest("zero-before", backward, optimizer.name) if backward is not None and single and optimizer.name else None
