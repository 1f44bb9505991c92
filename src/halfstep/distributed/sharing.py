"""Sharing a loader out over the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from halfstep.config.choice import Choice


class ShardSampler(Sampler[int]):
    """Every world-size-th index of one order that all ranks know; nothing is repeated and nothing is left out.

    Ranks can differ by one sample, which the engine's weights make right; `DistributedSampler` repeats or drops samples instead.

    Args:
        num_samples: length of the data set.
        rank: number of this rank.
        world_size: number of ranks.
        shuffle: whether the order is another permutation in each epoch.
        seed: with the epoch, decides the permutation; equal on all ranks.
    """

    def __init__(self, num_samples: int, rank: int, world_size: int, *, shuffle: bool, seed: int = 0) -> None:
        self._num_samples, self._rank, self._world_size = num_samples, rank, world_size
        self._shuffle, self._seed = shuffle, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of this epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self._order()[self._rank :: self._world_size])

    def __len__(self) -> int:
        return math.ceil((self._num_samples - self._rank) / self._world_size)

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._num_samples))
        generator = torch.Generator().manual_seed(hash((self._seed, self._epoch)) % 2**63)
        return torch.randperm(self._num_samples, generator=generator).tolist()


def share_out(loader: Any, rank: int, world_size: int) -> tuple[Any, Choice[str]]:
    """The loader of this rank's part, where the loader would give every rank everything; else the loader as it is."""
    if not isinstance(loader, DataLoader):
        return loader, Choice(value="as given", reason="not a DataLoader: it must yield this rank's part")
    if isinstance(loader.dataset, IterableDataset):
        return loader, Choice(value="as given", reason="an IterableDataset must yield this rank's part itself")
    if type(loader.batch_sampler) is not BatchSampler or type(loader.sampler) not in (RandomSampler, SequentialSampler):
        return loader, Choice(value="as given", reason=f"the loader brings its own {type(loader.sampler).__name__}")
    shuffle = isinstance(loader.sampler, RandomSampler)
    sampler = ShardSampler(len(loader.dataset), rank, world_size, shuffle=shuffle)  # type: ignore[arg-type]
    reason = f"every {world_size}th sample of one {'permutation' if shuffle else 'order'} for each rank, none repeated or lost"
    return _with_sampler(loader, sampler), Choice(value="shared out", reason=reason)


def _with_sampler(loader: DataLoader[Any], sampler: ShardSampler) -> DataLoader[Any]:
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
    )
