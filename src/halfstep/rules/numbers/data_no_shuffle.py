"""Rule HS612: data-no-shuffle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, EpochBegin, Made, Ref
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import in_loader_loop

CARD = Card(
    code="HS612",
    name="data-no-shuffle",
    severity=Severity.WARNING,
    what="The training loader yields the samples in a fixed order.",
    why=("Every epoch sees the same batches; sorted data give batches of one class. Pass `shuffle=True` or a sampler."),
    example="""\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


def train(model, train_set, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(train_set, batch_size=8)
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


def train(model, train_set, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(train_set, batch_size=8, shuffle=True)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A loader without shuffling or sampler that feeds backward passes, and is not replaced by one that shuffles."""
    current: Ref | None = None
    fed: Counter[Ref] = Counter()
    for event in trace.of(EpochBegin, Backward):
        if isinstance(event, EpochBegin):
            current = event.loader
        elif current is not None and in_loader_loop(event):
            fed[current] += 1
            current = None
    shuffled = {made.what.name for made in trace.of(Made) if made.what.kind == "loader" and made.facts.get("shuffle")}
    for made in trace.of(Made):
        facts = made.facts
        plain = not any(facts.get(name) for name in ("shuffle", "sampler", "batch_sampler", "iterable", "open arguments"))
        named = "train" in f"{facts.get('dataset name')} {made.what.name}".lower()
        known = named or (facts.get("map style") and fed[made.what] > 1)
        if (
            made.what.kind == "loader"
            and fed[made.what]
            and plain
            and known
            and made.what.name not in shuffled - {""}
            and not made.what.escaped
        ):
            fix = FixRequest("keyword", made.place, "shuffle=True") if made.place else None
            yield Found(made.place, f"`{made.what.name or 'this loader'}` trains in a fixed order", fix)
