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
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + self._epoch) % 2**63)
        return torch.randperm(self._num_samples, generator=generator).tolist()


def share_out(loader: Any, rank: int, world_size: int, *, seed: int) -> tuple[Any, Choice[str]]:
    """The loader of this rank's part, where the loader would give every rank everything; else the loader as it is.

    Args:
        loader: what the user gave.
        rank: number of this rank.
        world_size: number of ranks.
        seed: decides the permutations of a shuffled loader; equal on all ranks.
    """
    if because := _why_not(loader):
        return loader, Choice(value="as given", reason=because)
    shuffle = isinstance(loader.sampler, RandomSampler)
    sampler = ShardSampler(len(loader.dataset), rank, world_size, shuffle=shuffle, seed=seed)
    order = f"permutation an epoch (seed {seed})" if shuffle else "order"
    reason = f"each rank takes its turn among {world_size} in one {order}; no sample is repeated or lost"
    return _with_sampler(loader, sampler), Choice(value="shared out", reason=reason)


def seed_of(loader: Any) -> int:
    """What would have decided a loader's order: the seed of its generator, or torch's own."""
    generator = getattr(loader, "generator", None)
    return int(generator.initial_seed() if isinstance(generator, torch.Generator) else torch.initial_seed())


def _why_not(loader: Any) -> str | None:
    """Why a loader is taken to yield its rank's part as it is; None where it does not."""
    yields = "it must yield this rank's part"
    if type(loader) is not DataLoader:
        return f"a {type(loader).__name__} is no plain DataLoader: {yields}"
    if isinstance(loader.dataset, IterableDataset):
        return f"its data set is iterable: {yields}"
    if loader.batch_sampler is not None and (loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler):
        return f"it brings its own batch sampler, a {type(loader.batch_sampler).__name__}: {yields}"
    if type(loader.sampler) not in (RandomSampler, SequentialSampler):
        return f"it brings its own sampler, a {type(loader.sampler).__name__}: {yields}"
    if isinstance(loader.sampler, RandomSampler) and (loader.sampler.replacement or loader.sampler._num_samples is not None):
        return f"it draws its samples by itself (`replacement` or `num_samples`): {yields}"
    return None


def _with_sampler(loader: DataLoader[Any], sampler: ShardSampler) -> DataLoader[Any]:
    settings: dict[str, Any] = {} if loader.prefetch_factor is None else {"prefetch_factor": loader.prefetch_factor}
    if getattr(loader, "pin_memory_device", ""):
        settings["pin_memory_device"] = loader.pin_memory_device
    if hasattr(loader, "in_order"):  # since torch 2.6
        settings["in_order"] = loader.in_order
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
        persistent_workers=loader.persistent_workers,
        **settings,
    )
