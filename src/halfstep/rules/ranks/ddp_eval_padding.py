"""Rule HS514: ddp-eval-padding."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Made
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity

CARD = Card(
    code="HS514",
    name="ddp-eval-padding",
    severity=Severity.INFO,
    what="`DistributedSampler` repeats samples so that all ranks have equally many.",
    why="In evaluation the repeated samples count twice.",
    example="""\
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def train(model, dataset, val_set, epochs=2):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    val_loader = DataLoader(val_set, batch_size=8, sampler=val_sampler)
    model = DDP(model.cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        total = 0.0
        model.eval()
        with torch.no_grad():
            for x, y in val_loader:
                total += nn.functional.mse_loss(model(x), y).item()
        model.train()
""",
    instead="""\
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def train(model, dataset, val_set, epochs=2):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    val_sampler = DistributedSampler(val_set, shuffle=False, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=8, sampler=val_sampler)
    model = DDP(model.cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        total = 0.0
        model.eval()
        with torch.no_grad():
            for x, y in val_loader:
                total += nn.functional.mse_loss(model(x), y).item()
        model.train()
""",
    unfixed=(
        "To leave samples out, to leave their repetitions out of the metric, or to evaluate on one rank: each has its price."
    ),
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A sampler that does not shuffle nor drop, for a loader that is passed over without training."""
    for made in trace.of(Made):
        if (
            made.what.kind == "sampler"
            and made.facts.get("distributed")
            and not made.facts.get("shuffle")
            and not made.facts.get("drop_last")
        ):
            yield Found(made.place, "in evaluation the samples that pad the last batch count twice")
