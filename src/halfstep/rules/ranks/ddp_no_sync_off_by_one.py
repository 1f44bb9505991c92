"""Rule HS506: ddp-no-sync-off-by-one."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import NoSyncEnter, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import call_site, hear

CARD = Card(
    code="HS506",
    name="ddp-no-sync-off-by-one",
    severity=Severity.ERROR,
    what="The micro-batch before the step is not synchronised.",
    why=("The step uses gradients of this rank alone: the replicas drift apart. Synchronise exactly where the step is."),
    example="""\
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
            with model.no_sync() if i % accumulate != 0 else nullcontext():
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
    """A step whose last backward pass was not synchronised."""
    enter: NoSyncEnter | None = None
    for event, accounts in hear(trace):
        if isinstance(event, NoSyncEnter):
            enter = event
        elif isinstance(event, Step) and trace.exception is None:
            pending = accounts[event.optimizer].pending
            if (
                len(pending) > 1
                and pending[-1].in_no_sync
                and pending[-1].ddp
                and pending[-1].forward_in_no_sync
                and enter is not None
            ):
                yield Found(
                    call_site(enter, pending[-1]),
                    "the micro-batch before the step is not synchronised: the ranks step with their own gradients",
                    FixRequest("sync-at-step", enter.place, other=event.place) if enter.place is not None else None,
                )
