"""Rule HS102: amp-unscale-twice."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Ref, Step, Unscale
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import hear, into_window

CARD = Card(
    code="HS102",
    name="amp-unscale-twice",
    severity=Severity.ERROR,
    what="`unscale_` is called again for gradients that were unscaled already.",
    why=(
        "Before `update()` the scaler raises. With `update()` between, it is silent: what was accumulated is "
        "divided by the scale again and only the last micro-batch survives."
    ),
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
""",
    fix=Safety.SAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A second unscale of gradients that were not cleared or stepped since the first."""
    first: dict[Ref, Unscale] = {}
    stepped = {s.optimizer for s in trace.of(Step)}
    for event, accounts in hear(trace):
        if isinstance(event, Unscale) and event.optimizer in stepped:
            account = accounts[event.optimizer]
            if event.optimizer in first and account.pending and account.pending[0].serial < first[event.optimizer].serial:
                before = first[event.optimizer].place
                again = FixRequest("delete-again", event.place, other=before) if event.place is not None else None
                fix = again if before != event.place else into_window(trace, event, event.optimizer, "move-all-into")
                yield Found(event.place, f"gradients of `{event.optimizer.name}` are unscaled a second time", fix)
            first[event.optimizer] = event
