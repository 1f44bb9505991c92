"""Rule HS602: data-iterable-duplicate."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Fetch, Made, Place
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
    """A loader with workers, or one of ranks, over a stream of the program that asks for no worker or no rank."""
    for made in trace.of(Made):
        by_worker, by_rank = made.facts.get("undivided by worker"), made.facts.get("undivided by rank")
        if isinstance(by_worker, Place) and made.facts.get("workers") != 0:
            yield Found(by_worker, "every worker yields all samples: ask `get_worker_info()` which part is this worker's")
        elif isinstance(by_rank, Place) and _trains_on_ranks(trace, made):
            yield Found(by_rank, "every rank yields all samples: ask for the rank which part is this rank's")


def _trains_on_ranks(trace: Trace, made: Made) -> bool:
    turns = {e.loops[-1].loop for e in trace.of(Fetch) if e.loader == made.what and e.loops}
    return any(b.ddp and turns & {t.loop for t in b.loops} for b in trace.of(Backward))
