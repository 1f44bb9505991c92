"""Rule HS507: ddp-no-sync-backward-only."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS507",
    name="ddp-no-sync-backward-only",
    severity=Severity.PERF,
    what="`no_sync()` surrounds the backward pass but not the forward pass.",
    why="DDP decides in the forward pass: gradients are reduced all the same.",
    example="""\
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def train(model, dataset, accumulate=4, epochs=2):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DDP(model.cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            if (i + 1) % accumulate and i + 1 < len(loader):
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
""",
    instead="""\
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def train(model, dataset, accumulate=4, epochs=2):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DDP(model.cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % accumulate == 0 or i + 1 == len(loader)
            with nullcontext() if last else model.no_sync():
                loss = nn.functional.mse_loss(model(x), y) / accumulate
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
""",
    fix=Safety.SAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """An unsynchronised backward pass of a synchronised forward pass."""
    for event in trace.of(Backward):
        if event.in_no_sync and event.forward_in_no_sync is False and (event.ddp or event.models):
            model = next(iter(event.ddp or event.models)).name
            fix = FixRequest("widen-no-sync", event.place, model) if event.place is not None else None
            yield Found(event.place, "`no_sync()` has no effect here: the forward pass ran outside of it", fix)
