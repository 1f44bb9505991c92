"""Rule HS703: mode-no-grad-missing."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Numeric
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.validating import validation_passes

CARD = Card(
    code="HS703",
    name="mode-no-grad-missing",
    severity=Severity.WARNING,
    what="Validation builds graphs.",
    why="It costs the memory and time of training. Use `torch.no_grad()` or `torch.inference_mode()`.",
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
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        model.eval()
        for x, y in val_loader:
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
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        model.eval()
        for x, y in val_loader:
            with torch.no_grad():
                total = nn.functional.mse_loss(model(x), y).item()
""",
    fix=Safety.SAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Forward passes with gradients in a loop over validation data that has no backward pass."""
    trained = {m for b in trace.of(Backward) for m in b.models}
    asked = [n.serial for n in trace.of(Numeric) if n.kind in ("gradients of inputs", "model handed on")]
    for begin, forwards, end in validation_passes(trace):
        first = next((f for f in forwards if f.grad_enabled), None)
        needed = any(begin.serial < serial < end.serial for serial in asked)
        if first is not None and not needed and first.model in trained and not first.partly_frozen:
            fix = FixRequest("no-grad", begin.place) if begin.place is not None else None
            yield Found(begin.place, "validation builds graphs: use `torch.no_grad()`", fix)
