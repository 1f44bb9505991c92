"""Rule HS509: ddp-rank-local-skip."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity

CARD = Card(
    code="HS509",
    name="ddp-rank-local-skip",
    severity=Severity.ERROR,
    what="A micro-batch is skipped by what only this rank's data say.",
    why="The other ranks wait in the backward pass for ever. Agree on the skip with an all-reduce.",
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
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DDP(model.cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            if not torch.isfinite(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
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
            loss = nn.functional.mse_loss(model(x), y)
            bad = (~torch.isfinite(loss)).float()
            dist.all_reduce(bad)
            if bad.item():
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
""",
    unfixed=("The ranks must agree by a collective of what they skip, and on what becomes of a batch that only some find bad."),
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """With an exception in this rank's data, a backward pass is missing in the middle of a loop that goes on."""
    exception, usual = trace.exception, story.usual(trace)
    if exception is None or usual is None or exception.synced:
        return
    mine, all_of = (sum(bool(b.ddp) for b in t.of(Backward)) for t in (trace, usual))
    if 0 < all_of - mine <= 3 and mine > 0 and _goes_on(trace, usual):
        yield Found(exception.place, "this rank skips a backward pass in which the others wait")


def _goes_on(trace: Trace, usual: Trace) -> bool:
    def last(of: Trace) -> tuple[int, ...]:
        return tuple(t.index for t in max((b for b in of.of(Backward)), key=lambda b: b.serial).loops)

    return last(trace) == last(usual)
