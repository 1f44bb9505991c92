"""Rule HS609: data-loader-rebuilt."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import EpochBegin, Made, Place
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import call_site

CARD = Card(
    code="HS609",
    name="data-loader-rebuilt",
    severity=Severity.PERF,
    what="A loader is built anew in every epoch.",
    why="Its sampler is set up and its workers, if it has any, are started again each time. Build it once.",
    example="""\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


def train(model, dataset, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2)
        for x, y in loader:
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
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2, persistent_workers=True)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
""",
    fix=Safety.SAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Loaders made at one place in different turns of one loop, of the same things."""
    first: dict[tuple[Place, tuple[int, ...]], Made] = {}
    for made in trace.of(Made):
        if made.what.kind == "loader" and made.place is not None and not made.facts.get("varies"):
            before = first.setdefault((made.place, tuple(t.loop for t in made.loops)), made)
            if before is not made and made.loops:
                begin = next((e for e in trace.of(EpochBegin) if e.loader == made.what), None)
                yield Found(
                    call_site(made, begin), "this loader is built anew in every turn of the loop", FixRequest("hoist", made.place)
                )
