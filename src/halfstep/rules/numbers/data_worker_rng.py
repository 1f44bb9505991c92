"""Rule HS601: data-worker-rng."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Made, Seed
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS601",
    name="data-worker-rng",
    severity=Severity.ERROR,
    what="Data workers draw the same random numbers.",
    why=(
        "A constant seed in `worker_init_fn`, or a generator kept in the data set, gives every worker the "
        "same draws, and the same again each epoch."
    ),
    example="""\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


def start(worker_id):
    torch.manual_seed(17)


def train(model, dataset, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2, worker_init_fn=start)
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


def start(worker_id):
    torch.manual_seed(torch.initial_seed() % 2**32)


def train(model, dataset, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2, worker_init_fn=start)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Constant seeds in a worker, and generators that the data set brings along."""
    for event in trace.of(Seed):
        if event.in_worker and event.constant and not event.own:
            fix = FixRequest("seed-of-worker", event.place) if event.place is not None else None
            yield Found(event.place, "every worker gets this seed: they all draw the same numbers", fix)
    for made in trace.of(Made):
        if made.what.kind == "worker generator":
            yield Found(made.place, "every worker gets a copy of this generator: they all draw the same numbers")
