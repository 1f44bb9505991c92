"""Rule HS602: data-iterable-duplicate."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Made
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity

CARD = Card(
    code="HS602",
    name="data-iterable-duplicate",
    severity=Severity.ERROR,
    what="An iterable data set is not split over the workers.",
    why="Every worker yields all samples: each comes `num_workers` times.",
    example="""\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        for row in self.rows:
            yield row


def train(model, rows, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Stream(rows), batch_size=8, num_workers=2)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
""",
    instead="""\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        for row in self.rows[info.id :: info.num_workers]:
            yield row


def train(model, rows, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Stream(rows), batch_size=8, num_workers=2)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
""",
    unfixed=("How a stream is cut into parts depends on where its samples come from."),
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A loader with workers over a data set of the program whose iteration asks for no worker."""
    for made in trace.of(Made):
        if made.what.kind == "unsplit stream":
            yield Found(made.place, "every worker yields all samples: ask `get_worker_info()` which part is this worker's")
