"""Rule HS517: ddp-device-not-set."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Made, Place, Ref
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS517",
    name="ddp-device-not-set",
    severity=Severity.ERROR,
    what="All ranks of a machine use the same GPU.",
    why="A plain `cuda` device means GPU 0 until `torch.cuda.set_device(local_rank)` was called.",
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
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    device = torch.device("cuda")
    model = DDP(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
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
    """An NCCL group, a DDP model on a device without index, and no choice of device."""
    chosen = any(m.what.kind == "device choice" for m in trace.of(Made))
    if chosen or not any(m.what.kind == "group" and m.facts.get("backend") == "nccl" for m in trace.of(Made)):
        return
    for made in trace.of(Made):
        inner = made.facts.get("inner")
        if (
            made.facts.get("wrapper") == "ddp"
            and isinstance(inner, Ref)
            and trace.fact(inner, "indexed device", made.facts.get("indexed")) is False
        ):
            place = trace.fact(inner, "device made") or made.facts.get("device made")
            yield Found(
                place if isinstance(place, Place) else made.place,
                "every rank uses GPU 0: call `torch.cuda.set_device(local_rank)` first",
                next((FixRequest("set-device", m.place) for m in trace.of(Made) if m.what.kind == "group" and m.place), None),
            )
