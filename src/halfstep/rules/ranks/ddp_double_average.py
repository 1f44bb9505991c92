"""Rule HS519: ddp-double-average."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Clip
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS519",
    name="ddp-double-average",
    severity=Severity.WARNING,
    what="The loss is divided by the number of ranks on top of DDP's averaging.",
    why="DDP averages gradients over the ranks already: the update is as many times too small.",
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
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y) / dist.get_world_size()
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
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A division by the world size before the backward pass of a DDP model, or of its gradients after it."""
    for event in trace.of(Backward):
        for divisor in event.divisors:
            if "world" in divisor.tags and event.ddp and not divisor.tags & {"loader", "accum"}:
                fix = FixRequest("undivide", divisor.place) if divisor.place is not None else None
                yield Found(divisor.place, "DDP averages over the ranks already: do not divide the loss by the world size", fix)
    last: Backward | None = None
    for after in trace.of(Backward, Clip):
        if isinstance(after, Backward):
            last = after
        elif last is not None and last.ddp and after.divisor is not None and "world" in after.divisor.tags:
            yield Found(after.place, "DDP averages over the ranks already: do not divide the gradients by the world size")
