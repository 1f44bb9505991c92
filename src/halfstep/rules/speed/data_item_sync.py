"""Rule HS605: data-item-sync."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import HostRead, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity

CARD = Card(
    code="HS605",
    name="data-item-sync",
    severity=Severity.PERF,
    what="The host waits for the device in every step.",
    why=(
        "`.item()`, `.cpu()` or printing a tensor stops the host until the device has caught up. Collect on "
        "the device and read now and then."
    ),
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total = 0.0
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x.cuda()), y.cuda())
            loss.backward()
            optimizer.step()
            total += loss.item()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total = torch.zeros(1, device="cuda")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x.cuda()), y.cuda())
            loss.backward()
            optimizer.step()
            total += loss.detach()
""",
    unfixed=("Whoever reads the number would have to take a tensor, and read it now and then."),
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Reads of device tensors in the turns that step, without a modulo around."""
    turns = {t.loop for s in trace.of(Step) for t in s.loops[-1:]}
    for event in trace.of(HostRead):
        if event.device == "cuda" and event.loops and event.loops[-1].loop in turns and not event.guards & {"modulo", "data"}:
            yield Found(event.place, f"`{event.what}` makes the host wait for the device in every step")
