"""Rule HS505: ddp-no-sync-missing."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, NoSyncEnter, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import accumulation, optimizers

CARD = Card(
    code="HS505",
    name="ddp-no-sync-missing",
    severity=Severity.PERF,
    what="Gradients are reduced over the ranks on every micro-batch of a window.",
    why=(
        "Only the last micro-batch needs it: the rest of the traffic is wasted. Use `no_sync()` around "
        "forward and backward of the others."
    ),
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
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Windows of a DDP model without any unsynchronised micro-batch."""
    if trace.has(NoSyncEnter):
        return
    for optimizer in optimizers(trace):
        if accumulation(trace, optimizer) is None:
            continue
        first = next((b for b in trace.of(Backward) if optimizer in b.optimizers and b.ddp and not b.by_framework), None)
        if first is not None:
            step = next((s.place for s in trace.of(Step) if s.optimizer == optimizer), None)
            fix = FixRequest("no-sync", first.place, first.ddp[0].name, step) if first.place is not None and step else None
            yield Found(first.place, "gradients are reduced over the ranks on every micro-batch", fix)
