"""Rule HS510: ddp-rank-local-stop."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, LoopLeft
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity

CARD = Card(
    code="HS510",
    name="ddp-rank-local-stop",
    severity=Severity.ERROR,
    what="Training stops by what only this rank knows.",
    why="The other ranks wait for ever in the next collective. Broadcast the decision.",
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
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        if dist.get_rank() == 0 and epoch == 0:
            break
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
        stop = torch.tensor(float(dist.get_rank() == 0 and epoch == 0))
        dist.all_reduce(stop)
        if stop.item():
            break
""",
    unfixed=("One rank must decide and tell the others, and which number decides is for the author to say."),
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A loop that ends early on one rank, or by this rank's data, while the usual run goes on."""
    usual = story.usual(trace)
    if usual is None or usual is trace or not any(b.ddp for b in usual.of(Backward)):
        return
    mine, theirs = list(trace.of(Backward)), list(usual.of(Backward))
    differing = [d for d in trace.decisions if d not in usual.decisions]
    if not mine or not theirs or len(differing) != 1 or differing[0].synced:
        return
    decision = differing[0]
    fewer, more = (mine, theirs) if len(mine) < len(theirs) else (theirs, mine)
    stops = len(fewer) < len(more) and [t.index for t in fewer[-1].loops] != [t.index for t in more[-1].loops]
    if decision.kind in ("data", "rank") and stops and len(fewer[-1].loops) == len(more[-1].loops):
        shorter = trace if fewer is mine else usual
        running = {t.loop for t in fewer[-1].loops}
        left = [e for e in shorter.of(LoopLeft) if e.loops and e.loops[-1].loop in running]
        if left:
            yield Found(left[-1].place, "training stops by what only this rank knows: the others wait for ever")
