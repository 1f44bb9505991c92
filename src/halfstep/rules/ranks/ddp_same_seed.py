"""Rule HS515: ddp-same-seed."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, RandomDraw, Seed
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import call_site

CARD = Card(
    code="HS515",
    name="ddp-same-seed",
    severity=Severity.WARNING,
    what="All ranks use the same seed for what they draw in training.",
    why=("Noise, dropout and augmentation are the same on all ranks. Add the rank to the seed after the model was built."),
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
    torch.manual_seed(1234)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x + torch.randn_like(x)), y).backward()
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
    torch.manual_seed(1234 + dist.get_rank())
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x + torch.randn_like(x)), y).backward()
            optimizer.step()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A constant seed as the last one before random draws in a distributed training loop."""
    if not any(b.ddp for b in trace.of(Backward)):
        return
    for own in (False, True):
        yield from _alike(trace, [e for e in trace.of(Seed) if not e.in_worker and e.own == own], own)


def _alike(trace: Trace, seeds: list[Seed], own: bool) -> Iterator[Found]:
    turns = {t.loop for b in trace.of(Backward) for t in b.loops}
    outer = len(seeds[-1].loops) if seeds else 0
    of_kind = (e for e in trace.of(RandomDraw) if e.own == own)
    draws = [e for e in of_kind if len(e.loops) > outer and any(t.loop in turns for t in e.loops)]
    if seeds and draws and all(s.constant for s in seeds):
        backward = next(b for b in trace.of(Backward) if b.ddp)
        place = call_site(seeds[-1], backward)
        wrapper = trace.made(backward.ddp[0])
        fix = FixRequest("seed-of-rank", place, other=wrapper.place) if place is not None and wrapper is not None else None
        yield Found(place, "all ranks draw the same random numbers: add the rank to the seed", fix)
