"""Rule HS101: amp-clip-before-unscale."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Clip, Ref
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import Accounts, hear

CARD = Card(
    code="HS101",
    name="amp-clip-before-unscale",
    severity=Severity.ERROR,
    what="Gradients are clipped or rewritten while they are multiplied by the loss scale.",
    why=(
        "The threshold is compared with gradients up to 65536 times too large, so nearly every update is "
        "shrunk to almost nothing (SGD), or clipping is always on (Adam)."
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
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Clips of gradients that are still scaled."""
    for event, accounts in hear(trace):
        if not isinstance(event, Clip) or event.kind in ("divide", "framework", "scaled", "set") or event.exhausted:
            continue
        scaled = [o for o in event.optimizers if accounts[o].scaled or (event.scaled and accounts[o].pending)]
        if scaled:
            yield Found(
                event.place,
                f"gradients of `{scaled[0].name}` are clipped while multiplied by the loss scale",
                _fix(event, scaled, accounts),
            )


def _fix(event: Clip, scaled: list[Ref], accounts: Accounts) -> FixRequest | None:
    scaler = accounts[scaled[0]].pending[-1].scaler if accounts[scaled[0]].pending else None
    if len(scaled) != 1 or event.place is None or scaler is None or not (scaler.name and scaled[0].name):
        return None
    return FixRequest("unscale-before", event.place, f"{scaler.name}|{scaled[0].name}")
