"""Rule HS504: ddp-module-bypass."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Collective, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS504",
    name="ddp-module-bypass",
    severity=Severity.ERROR,
    what="The loss is computed through the inner module of a DDP wrapper.",
    why=("Gradients are not averaged over the ranks: the replicas drift apart without a message. Call the wrapper."),
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
            nn.functional.mse_loss(model.module(x), y).backward()
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
    """Backward passes of losses that bypass the wrapper."""
    for event in trace.of(Backward):
        if event.bypassed is not None and not event.ddp and not event.by_framework and _used(trace, event):
            yield Found(
                event.bypassed,
                "this forward pass bypasses the DDP wrapper: its gradients are not averaged over the ranks",
                FixRequest("call-wrapper", event.bypassed),
            )


def _used(trace: Trace, event: Backward) -> bool:
    """Whether an optimizer steps after this pass, or its steps were not heard at all; who averages by hand needs no DDP."""
    if any(c.averages and c.serial > event.serial for c in trace.of(Collective)):
        return False
    steps = [s for s in trace.of(Step) if s.optimizer in event.optimizers]
    return not steps or steps[-1].serial > event.serial
