"""Rule HS501: ddp-no-set-epoch."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, EpochBegin, Made, Ref, SetEpoch
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS501",
    name="ddp-no-set-epoch",
    severity=Severity.ERROR,
    what="`set_epoch` of a distributed sampler is never called, or always with the same value.",
    why="Every epoch has the same order on all ranks.",
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
    """A shuffling distributed sampler whose loader is passed over twice without a new epoch number."""
    for made in trace.of(Made):
        sampler = made.facts.get("sampler") or made.facts.get("batch_sampler")
        if made.what.kind != "loader" or not isinstance(sampler, Ref) or sampler.escaped or made.what.escaped:
            continue
        if not (trace.fact(sampler, "distributed") and trace.fact(sampler, "shuffle")):
            continue
        passes = [e for e in trace.of(EpochBegin) if e.loader == made.what]
        told = [e.value for e in trace.of(SetEpoch) if e.target == sampler]
        if len(passes) >= 2 and len(set(told)) < 2 and _trains(trace, passes):
            constant = next((e.place for e in trace.of(SetEpoch) if e.target == sampler), None)
            fix = _fix(trace, passes, sampler) if constant is None else None
            yield Found(
                constant or (fix.place if fix is not None else passes[0].place),
                f"`{sampler.name or 'the sampler'}` is not told the epoch: every epoch has the same order",
                fix,
            )


def _trains(trace: Trace, passes: list[EpochBegin]) -> bool:
    return any(b.serial > passes[0].serial for b in trace.of(Backward))


def _fix(trace: Trace, passes: list[EpochBegin], sampler: Ref) -> FixRequest | None:
    """To tell it the number of the loop over epochs, the innermost around all passes."""
    shared = passes[0].loops[-1:]
    loop = shared[0].place if shared and all(e.loops[-1:] and e.loops[-1].loop == shared[0].loop for e in passes) else None
    made = trace.made(sampler)
    return FixRequest("set-epoch", loop, other=made.place) if loop is not None and made is not None and made.place else None
