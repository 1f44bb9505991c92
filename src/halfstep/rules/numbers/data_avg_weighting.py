"""Rule HS611: data-avg-weighting."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import EpochBegin, Numeric
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import call_site

CARD = Card(
    code="HS611",
    name="data-avg-weighting",
    severity=Severity.WARNING,
    what="A sum of batch means is divided by the number of samples.",
    why=(
        "The reported loss is too small by the batch size. Multiply each mean by its batch's size, or divide "
        "by the number of batches."
    ),
    example="""\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


def train(model, dataset, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    for epoch in range(epochs):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(total / len(loader.dataset))
""",
    instead="""\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


def train(model, dataset, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    for epoch in range(epochs):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        print(total / len(loader.dataset))
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Such a division, wherever it is."""
    for event in trace.of(Numeric):
        if event.kind == "mean over dataset":
            yield Found(event.place, "a sum of batch means is divided by the number of samples", _fix(event))
        elif event.kind == "mean of means":
            begun = next((e for e in reversed(list(trace.of(EpochBegin))) if e.serial < event.serial), None)
            message = "the last batch is shorter and counts as much as the others in this mean of batch means"
            yield Found(call_site(event, begun), message)


def _fix(event: Numeric) -> FixRequest | None:
    return FixRequest("count-batches", event.place) if event.place is not None else None
