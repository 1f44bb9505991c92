"""Rule HS512: ddp-load-no-map-location."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Load, Made
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS512",
    name="ddp-load-no-map-location",
    severity=Severity.WARNING,
    what="`torch.load` has no `map_location` in a distributed script.",
    why="Tensors come back on the device they were saved from: all ranks allocate on GPU 0.",
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
    model.module.load_state_dict(torch.load("last.pt"))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
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
    model.module.load_state_dict(torch.load("last.pt", map_location="cpu"))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
""",
    fix=Safety.SAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Loads without a place in a trace with a process group or a DDP model."""
    groups = [m for m in trace.of(Made) if m.what.kind == "group"]
    wrapped = any(m.facts.get("wrapper") == "ddp" for m in trace.of(Made))
    if not (groups or wrapped) or any(m.facts.get("backend") == "gloo" for m in groups):
        return
    ended = min((m.serial for m in trace.of(Made) if m.what.kind == "spawn end"), default=len(trace.events))
    for event in trace.of(Load):
        if event.serial < ended and event.target is None and not event.map_location:
            fix = FixRequest("keyword", event.place, 'map_location="cpu"') if event.place else None
            yield Found(event.place, "without `map_location` every rank loads onto GPU 0", fix)
