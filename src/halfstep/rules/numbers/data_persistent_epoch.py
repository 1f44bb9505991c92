"""Rule HS603: data-persistent-epoch."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Made, SetEpoch
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS603",
    name="data-persistent-epoch",
    severity=Severity.WARNING,
    what="The epoch is set on a data set whose workers live on.",
    why="Persistent workers hold a copy from their start: they never see the new value.",
    example="""\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Data(Dataset):
    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 64

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return torch.zeros(1) + self.epoch, index


def train(model, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = Data()
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2, persistent_workers=True)
    for epoch in range(epochs):
        dataset.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
""",
    instead="""\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Data(Dataset):
    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 64

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return torch.zeros(1) + self.epoch, index


def train(model, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = Data()
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2)
    for epoch in range(epochs):
        dataset.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """An epoch set on a data set after its loader with persistent workers was made."""
    loaders = [m for m in trace.of(Made) if m.what.kind == "loader" and m.facts.get("persistent")]
    for event in trace.of(SetEpoch):
        for loader in loaders:
            if loader.facts.get("dataset") == event.target and event.serial > loader.serial and event.loops:
                fix = FixRequest("keyword", loader.place, "persistent_workers=False") if loader.place is not None else None
                line = event.place.line if event.place is not None else "?"
                yield Found(
                    loader.place, f"persistent workers never see what line {line} sets: they hold a copy of the data set", fix
                )
