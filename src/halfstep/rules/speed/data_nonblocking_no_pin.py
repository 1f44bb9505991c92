"""Rule HS606: data-nonblocking-no-pin."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Transfer
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS606",
    name="data-nonblocking-no-pin",
    severity=Severity.PERF,
    what="`non_blocking=True` copies from memory that is not pinned.",
    why="Such a copy blocks all the same. Pass `pin_memory=True` to the loader.",
    example="""\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


def train(model, dataset, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    for epoch in range(epochs):
        for x, y in loader:
            x = x.to("cuda", non_blocking=True)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
""",
    instead="""\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


def train(model, dataset, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(dataset, batch_size=8, shuffle=True, pin_memory=True)
    for epoch in range(epochs):
        for x, y in loader:
            x = x.to("cuda", non_blocking=True)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
""",
    fix=Safety.SAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Copies of batches of a loader that does not pin."""
    for event in trace.of(Transfer):
        made = trace.made(event.loader) if event.loader is not None else None
        if made is None or event.blocking or event.to == "cpu" or made.facts.get("open arguments"):
            continue
        if made.facts.get("pin_memory") in (False, None):
            fix = FixRequest("keyword", made.place, "pin_memory=True") if made.place else None
            yield Found(made.place, "batches of this loader are copied with `non_blocking=True` but are not pinned", fix)
