"""Rule HS511: ddp-save-all-ranks."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Made, Save
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS511",
    name="ddp-save-all-ranks",
    severity=Severity.WARNING,
    what="Every rank writes the same checkpoint file.",
    why="Concurrent writers leave broken files. Save on rank 0 only.",
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
        torch.save(model.module.state_dict(), "last.pt")
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
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "last.pt")
""",
    fix=Safety.SAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A save on another rank than 0, or without a question for the rank."""
    if not any(b.ddp for b in trace.of(Backward)):
        return
    guarded = {e.place for t in story.traces if t.root == trace.root and t.rank == 0 for e in t.of(Save)}
    others = [t for t in story.traces if t.root == trace.root and t.rank not in (None, 0)]
    for event in trace.of(Save):
        if "rank" in event.guards or event.by_rank_aware:
            continue
        if trace.rank not in (None, 0) or (trace.rank is None and not others and not guarded - {event.place}):
            fix = FixRequest("first-rank", event.place) if event.place and _grouped(story, event) else None
            yield Found(event.place, "every rank writes this file", fix)


def _grouped(story: Story, save: Save) -> bool:
    """Whether there is a process group to ask for the rank wherever this is saved."""
    saving = [t for t in story.traces if any(e.place == save.place for e in t.of(Save))]
    return all(any(m.what.kind == "group" for m in t.of(Made)) for t in saving)
