"""Rule HS508: ddp-rank-conditional-collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Collective, Event, Forward, Place
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity

CARD = Card(
    code="HS508",
    name="ddp-rank-conditional-collective",
    severity=Severity.ERROR,
    what="Only some ranks reach a collective.",
    why="The others never join it: the run hangs. Let every rank call it, or evaluate the inner module.",
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
        if dist.get_rank() == 0:
            dist.barrier()
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
        dist.barrier()
""",
    unfixed=("Either all ranks should call it, or none: the text does not say which."),
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Collectives of this rank that the other rank's otherwise equal world does not have."""
    twin = _other_rank(trace, story)
    if twin is None:
        return
    mine, theirs = _counts(trace), _counts(twin)
    for event in trace.of(Collective, Forward):
        kind = _kind(event)
        if kind is not None and "rank" in event.guards | _early(trace) and mine[kind] > theirs[kind] and not _at(twin, event):
            yield Found(
                _asked(event) if "rank" in event.guards else event.place,
                f"only some ranks reach this {kind}: the others hang",
            )


def _asked(event: Event) -> Place | None:
    """What stands under the question for the rank on the way to an event."""
    depth = min((int(g.removeprefix("rank@")) for g in event.guards if g.startswith("rank@")), default=0)
    return event.stack[depth] if depth < len(event.stack) else event.place


def _other_rank(trace: Trace, story: Story) -> Trace | None:
    mine = {d.key: d.answer for d in trace.decisions if d.kind != "rank"}
    for other in story.traces:
        if other.root != trace.root or other.rank is None or trace.rank is None or other.rank == trace.rank:
            continue
        if all(mine.get(d.key, d.answer) == d.answer for d in other.decisions if d.kind != "rank"):
            return other
    return None


def _early(trace: Trace) -> frozenset[str]:
    return frozenset({"rank"}) if trace.rank is not None else frozenset()


def _kind(event: Event) -> str | None:
    if isinstance(event, Collective):
        return None if event.of_some else event.kind
    if isinstance(event, Forward) and event.wrapped and (event.grad_enabled or event.buffers is not False):
        return "forward pass of a DDP model"
    return None


def _counts(trace: Trace) -> Counter[str]:
    return Counter(kind for kind in map(_kind, trace.of(Collective, Forward)) if kind is not None)


def _at(trace: Trace, event: Event) -> bool:
    return any(other.place == event.place for other in trace.of(Collective, Forward))
