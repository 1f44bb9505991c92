"""Rule HS513: ddp-metrics-local."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Collective, EpochBegin, EpochEnd, Ref, Report
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity

CARD = Card(
    code="HS513",
    name="ddp-metrics-local",
    severity=Severity.WARNING,
    what="A metric of one rank's shard is reported as if it were global.",
    why="It covers 1/world of the data and differs over the ranks. Reduce it first.",
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
        if dist.get_rank() == 0:
            print(total / len(val_loader))
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
        total = torch.zeros(1)
        model.eval()
        with torch.no_grad():
            for x, y in val_loader:
                total += nn.functional.mse_loss(model(x), y).item()
        model.train()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(total / len(val_loader))
""",
    unfixed=(
        "How a metric is put together from the parts of the ranks (sum, mean by samples, all predictions) depends on the metric."
    ),
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Numbers of a sharded evaluation loader shown under a question for the rank, with no collective between."""
    begun: dict[Ref, EpochBegin] = {}
    running: Ref | None = None
    for event in trace.of(EpochBegin, EpochEnd, Backward, Collective, Report):
        if isinstance(event, EpochBegin):
            running = event.loader
            if _is_shard(trace, event.loader):
                begun[event.loader] = event
        elif isinstance(event, EpochEnd):
            running = None
        elif isinstance(event, Backward):
            begun.pop(running, None) if running is not None else None
        elif isinstance(event, Collective) and event.kind != "barrier":
            begun.clear()
        elif isinstance(event, Report) and event.loader in begun and ("rank" in event.guards or event.kind == "schedule"):
            yield Found(event.place, "this number covers one rank's shard only: reduce it first")


def _is_shard(trace: Trace, loader: Ref) -> bool:
    """Whether a loader reads one rank's part, in order, as evaluation does."""
    sampler, tags = trace.fact(loader, "sampler"), trace.fact(loader, "tags")
    by_sampler = isinstance(sampler, Ref) and trace.fact(sampler, "distributed") and not trace.fact(sampler, "shuffle")
    return bool(by_sampler) or (isinstance(tags, frozenset) and bool(tags & {"rank", "strided"}))
