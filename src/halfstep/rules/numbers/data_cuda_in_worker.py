"""Rule HS608: data-cuda-in-worker."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Transfer
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity

CARD = Card(
    code="HS608",
    name="data-cuda-in-worker",
    severity=Severity.ERROR,
    what="CUDA tensors are made in a data worker.",
    why="Forked workers cannot use CUDA: they raise. Return CPU tensors and move the batch in the loop.",
    example="""\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Data(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return torch.tensor(self.rows[index]).cuda(), index


def train(model, rows, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Data(rows), batch_size=8, shuffle=True, num_workers=2)
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


class Data(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return torch.tensor(self.rows[index]), index


def train(model, rows, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Data(rows), batch_size=8, shuffle=True, num_workers=2)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
""",
    unfixed=("The batch must then be moved in the loop, to the device and in the form that it needs there."),
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Transfers to CUDA in a worker."""
    for event in trace.of(Transfer):
        if event.in_worker and event.to == "cuda":
            yield Found(event.place, "a data worker cannot make CUDA tensors: move the batch in the loop")
