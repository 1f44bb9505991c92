"""Rule HS702: mode-eval-missing."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, EpochBegin, Forward, Mode
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.validating import validation_passes

CARD = Card(
    code="HS702",
    name="mode-eval-missing",
    severity=Severity.WARNING,
    what="A model is validated in training mode.",
    why=("Dropout is on and batch normalisation learns from the validation data. Call `eval()` before and `train()` after."),
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
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Forward passes in training mode in a loop over validation data, of a model for which the mode matters."""
    trained = {m for b in trace.of(Backward) for m in b.models}
    asked = {e.model for e in trace.of(Mode)}
    for begin, forwards, _ in validation_passes(trace):
        for event in forwards:
            matters = event.mode_dependent or (event.mode_dependent is None and event.model in asked)
            if event.training and event.model in trained and matters:
                yield Found(begin.place, f"`{event.model.name}` is validated in training mode", _fix(trace, begin, event))


def _fix(trace: Trace, begin: EpochBegin, forward: Forward) -> FixRequest | None:
    """To set the mode before the loop, and back after it where nothing else does before training goes on."""
    later = (e for e in trace.of(Mode, Backward) if e.serial > forward.serial)
    following = next((e for e in later if isinstance(e, Backward) or (e.training and e.model == forward.model)), None)
    back = "back" if isinstance(following, Backward) else ""
    loop = begin.place
    return FixRequest("evaluate", loop, back, forward.place) if loop is not None and forward.place is not None else None
