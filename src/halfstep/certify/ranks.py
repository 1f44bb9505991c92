"""Two ranks against one process: the same global batch, shared out unevenly, under each kind of sharding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from halfstep.certify.certificate import Line, Topic
from halfstep.certify.exact import Exact, Result
from halfstep.certify.others import Task, run_ranks
from halfstep.certify.recording import update_of
from halfstep.certify.splits import compared
from halfstep.certify.stillness import still
from halfstep.certify.subject import Parts, Subject
from halfstep.config.options import Sharding
from halfstep.distributed import world
from halfstep.errors import UsageError

RANKS = 2
SHARDINGS = (Sharding.DDP, Sharding.ZERO2, Sharding.ZERO3)
FOUND = "found-{}.pt"


def rank_lines(subject: Subject, parts: Parts, right: Exact, folder: Path) -> Iterator[Line]:
    """The claims about two ranks; both run on this machine. What the engine refuses is not asked; ranks that fail do not hold."""
    failed = run_ranks(Task(part="ranks", subject=subject, folder=str(folder)), RANKS)
    for sharding in SHARDINGS:
        claim = f"{sharding}: two ranks, one with {len(share(parts.batches, 0))} micro-batches and one with "
        claim += f"{len(share(parts.batches, 1))}, make the update of one process"
        path = folder / FOUND.format(sharding.value)
        found = torch.load(path, weights_only=True) if path.exists() else None
        if found is None:
            yield Line(topic=Topic.RANKS, claim=claim, holds=False, figure=failed or "the ranks ended without a word")
        elif "refused" in found:
            yield Line(topic=Topic.RANKS, claim=claim, holds=None, note=found["refused"])
        else:
            yield compared(claim, right, Result(**found), topic=Topic.RANKS)


def run_as_rank(subject: Subject, folder: Path) -> None:
    """What each of the ranks does; rank 0 keeps what it found."""
    place = world()
    parts, _ = still(subject.make())
    for sharding in SHARDINGS:
        mine = share(parts.batches, place.rank)
        try:
            result, _ = update_of(parts, mine, sharding=sharding.value)
            kept: dict[str, Any] = {"loss": result.loss, "gradients": result.gradients}
        except UsageError as error:
            kept = {"refused": str(error)}
        if place.is_first:
            torch.save(kept, folder / FOUND.format(sharding.value))


def share(batches: Sequence[Any], rank: int) -> list[Any]:
    """A rank's part of a global batch: the first micro-batch for rank 1, the rest for rank 0."""
    return list(batches[:1]) if rank else list(batches[1:])
