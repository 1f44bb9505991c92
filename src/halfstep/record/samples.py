"""Which samples of a data set loaders hand out, by index, so that those that nobody sees are known."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from halfstep.events.vocabulary import Place

MOST_SAMPLES = 2**22
MOST_LOADERS = 16


@dataclass(slots=True)
class Coverage:
    """What one loader of one process handed out."""

    place: Place | None
    seen: bytearray
    """A byte a sample: how many passes it was handed out in, 255 at most."""
    parts: int
    """Among how many ranks its sampler splits the data set."""
    dropped: int
    """Samples that its sampler may drop at the end of every pass."""
    passes: int = 0
    """Passes that came to their end."""


@dataclass(slots=True)
class Samples:
    """Follows the loaders whose sampler should hand out everything: in order, shuffled, or split over ranks."""

    coverages: list[Coverage] = field(default_factory=list)
    _of: weakref.WeakKeyDictionary[DataLoader[Any], Coverage | None] = field(default_factory=weakref.WeakKeyDictionary)

    def handed_out(self, loader: DataLoader[Any], place: Place | None, indices: Sequence[int] | None) -> None:
        """A loader handed out a batch; without indices its pass has come to its end."""
        if loader not in self._of:
            self._of[loader] = self._meet(loader, place)
        coverage = self._of[loader]
        if coverage is None:
            return
        coverage.passes += indices is None
        for index in indices or ():
            coverage.seen[index] = min(coverage.seen[index] + 1, 255)

    def _meet(self, loader: DataLoader[Any], place: Place | None) -> Coverage | None:
        size = _whole(loader) if len(self.coverages) < MOST_LOADERS else 0
        if not size:
            return None
        batches: Any = loader.batch_sampler
        parts = getattr(batches.sampler, "num_replicas", 1)
        dropped = batches.batch_size * parts if batches.drop_last else 0
        dropped += parts if getattr(batches.sampler, "drop_last", False) else 0
        self.coverages.append(Coverage(place, bytearray(size), parts, dropped))
        return self.coverages[-1]


def _whole(loader: DataLoader[Any]) -> int:
    """The size of the data set where a loader's sampler hands all of it out; 0 where it need not, or is too large to follow."""
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return 0
    sampler = batches.sampler
    shuffled = type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    if not shuffled and type(sampler) not in (SequentialSampler, DistributedSampler):
        return 0
    size = len(loader.dataset)  # type: ignore[arg-type]
    return size if size <= MOST_SAMPLES else 0


@dataclass(frozen=True, slots=True)
class Joined:
    """What all processes together handed out of one data set."""

    place: Place | None
    size: int
    passes: int
    unseen: tuple[int, ...]
    doubled: int
    """Samples that were handed out more than once a pass."""
    explained: int
    """So many are dropped at the end of a pass, by wish."""


def joined(processes: Sequence[Sequence[Coverage]]) -> Iterator[Joined]:
    """The loaders that every process made, in the order of their first pass, where all passes came to their end."""
    for same in zip(*processes, strict=False):
        first = same[0]
        whole = all(c.passes and len(c.seen) == len(first.seen) and c.place == first.place for c in same)
        if whole and first.parts in (1, len(same)):
            counts = [sum(of_all) for of_all in zip(*(c.seen for c in same), strict=True)]
            passes = min(c.passes for c in same)
            unseen = tuple(index for index, count in enumerate(counts) if not count)
            yield Joined(first.place, len(counts), passes, unseen, sum(n > passes for n in counts), first.dropped)
