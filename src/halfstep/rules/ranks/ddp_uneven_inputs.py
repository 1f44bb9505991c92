"""Rule HS516: ddp-uneven-inputs."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, EpochBegin, Made, Turn
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity
from halfstep.rules.listening import trains_on

CARD = Card(
    code="HS516",
    name="ddp-uneven-inputs",
    severity=Severity.ERROR,
    what="Ranks may have different numbers of batches.",
    why=(
        "One rank ends its loader earlier, the others hang in its missing all-reduce. Drop or pad to equal "
        "counts, or use `model.join()`."
    ),
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
    files = list(dataset)
    mine = files[dist.get_rank() :: dist.get_world_size()]
    model = DDP(model.cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in mine:
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
    unfixed=("Batches can be dropped, repeated, or waited for with `join()`: each trains on something else."),
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Strided shards of data that a DDP model is trained with, without join."""
    alike = all(_counts_alike(b.loops) for b in trace.of(Backward) if b.ddp)
    shards = {e.loader for e in trace.of(EpochBegin) if _is_shard(trace.fact(e.loader, "tags"))}
    if alike or (shards and not any(trains_on(trace, loader) for loader in shards)):
        return
    if any(m.what.kind == "join" for m in trace.of(Made)):
        return
    for made in trace.of(Made):
        if made.what.kind == "strided shard":
            yield Found(
                made.place, "shards cut by rank may hold different numbers of batches: one rank ends early and the others hang"
            )


def _is_shard(tags: object) -> bool:
    return isinstance(tags, frozenset) and "strided" in tags


def _counts_alike(loops: tuple[Turn, ...]) -> bool:
    """Whether only loops are around that count to a number which has nothing to do with the data."""
    return bool(loops) and all(turn.over == "count" and not turn.tags & {"strided", "uneven", "rank", "part"} for turn in loops)
