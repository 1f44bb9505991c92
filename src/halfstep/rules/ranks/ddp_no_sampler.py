"""Rule HS502: ddp-no-sampler."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Made
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import trains_on

CARD = Card(
    code="HS502",
    name="ddp-no-sampler",
    severity=Severity.ERROR,
    what="A DDP model is trained from a loader that is not split over the ranks.",
    why=("With one seed all ranks see the same batches; otherwise their random batches overlap. Use `DistributedSampler`."),
    example="""\
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def train(model, dataset, epochs=2):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    model = DDP(model.cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
""",
    instead="""\
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def train(model, dataset, epochs=2):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DDP(model.cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A loader without sampler that feeds the backward passes of a DDP model."""
    if not any(b.ddp for b in trace.of(Backward)):
        return
    for made in trace.of(Made):
        facts = made.facts
        if made.what.kind != "loader" or facts.get("sampler") is not None or facts.get("batch_sampler") is not None:
            continue
        tags = facts.get("tags")
        split = isinstance(tags, frozenset) and tags & {"rank", "strided"}
        if facts.get("iterable") or facts.get("open arguments") or split or made.what.escaped or not trains_on(trace, made.what):
            continue
        fix = FixRequest("share", made.place) if made.place is not None else None
        yield Found(made.place, f"`{made.what.name or 'this loader'}` is not split over the ranks, but trains a DDP model", fix)
