"""Rule HS105: amp-update-per-microbatch."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Ref, ScalerUpdate, Step, ZeroGrad
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Safety, Severity
from halfstep.rules.listening import Account, hear, into_window

CARD = Card(
    code="HS105",
    name="amp-update-per-microbatch",
    severity=Severity.ERROR,
    what="`scaler.update()` runs on micro-batches that do not step.",
    why=(
        "With nothing checked it asserts; otherwise the scale may change while gradients of the old scale are"
        " pending, and the window mixes two scales."
    ),
    example="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x), y) / accumulate
            scaler.scale(loss).backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x), y) / accumulate
            scaler.scale(loss).backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """An update while gradients wait for their step, to which more are added."""
    early: dict[Ref, ScalerUpdate] = {}
    for event, accounts in hear(trace):
        if isinstance(event, Step):
            early.pop(event.optimizer, None)
        elif isinstance(event, ZeroGrad):
            for optimizer in event.optimizers:
                early.pop(optimizer, None)
        elif isinstance(event, ScalerUpdate):
            waiting = [o for o, a in accounts.items() if any(b.scaler == event.scaler for b in a.pending)]
            early.update(dict.fromkeys(waiting, event))
        elif isinstance(event, Backward):
            for optimizer in event.optimizers:
                if optimizer in early and _again(event, accounts[optimizer]):
                    fix = into_window(trace, early[optimizer], optimizer)
                    yield Found(early[optimizer].place, "the loss scale is updated on micro-batches that do not step", fix)


def _again(event: Backward, account: Account) -> bool:
    return any(earlier.stack == event.stack for earlier in account.pending)
