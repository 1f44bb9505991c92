"""How a loader is shared out over ranks, without any ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from halfstep.distributed.sharing import ShardSampler, seed_of, share_out

DATA = TensorDataset(torch.arange(10))


@given(
    num_samples=st.integers(0, 50),
    world_size=st.integers(1, 7),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 1000),
)
def test_the_parts_of_all_ranks_are_all_samples_once(
    num_samples: int, world_size: int, shuffle: bool, seed: int, epoch: int
) -> None:
    samplers = [ShardSampler(num_samples, rank, world_size, shuffle=shuffle, seed=seed) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    parts = [list(sampler) for sampler in samplers]
    assert sorted(index for part in parts for index in part) == list(range(num_samples))
    assert [len(sampler) for sampler in samplers] == [len(part) for part in parts]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_epochs_and_seeds_are_permutations_of_their_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = ShardSampler(100, 0, 1, shuffle=True, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert all(one != other for number, one in enumerate(orders) for other in orders[:number]), "no epoch repeats another seed's"
    assert order(2, 1) == order(2, 1)


def test_the_next_global_batch_is_the_same_on_any_number_of_ranks() -> None:
    """Rank by rank the n-th batch holds what one process would put into its next `ranks` batches."""
    one = list(ShardSampler(24, 0, 1, shuffle=True, seed=5))
    two = [list(ShardSampler(24, rank, 2, shuffle=True, seed=5)) for rank in range(2)]
    for start in range(0, 12, 3):
        together = two[0][start : start + 3] + two[1][start : start + 3]
        assert sorted(together) == sorted(one[2 * start : 2 * start + 6])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Special(DataLoader[Any]):
    pass


YIELDS = "it must yield this rank's part"
LEFT_ALONE: dict[str, tuple[Any, str]] = {
    "a list": ([1, 2], f"a list is no plain DataLoader: {YIELDS}"),
    "a subclass": (Special(DATA), f"a Special is no plain DataLoader: {YIELDS}"),
    "a stream": (DataLoader(Stream()), f"its data set is iterable: {YIELDS}"),
    "batches of its own": (
        DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 2, drop_last=False)),
        f"it brings its own batch sampler, a BatchSampler: {YIELDS}",
    ),
    "a sampler of its own": (
        DataLoader(DATA, sampler=SubsetRandomSampler([1, 2])),
        f"it brings its own sampler, a SubsetRandomSampler: {YIELDS}",
    ),
    "draws with replacement": (
        DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)),
        f"it draws its samples by itself (`replacement` or `num_samples`): {YIELDS}",
    ),
    "draws fewer": (
        DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=4)),
        f"it draws its samples by itself (`replacement` or `num_samples`): {YIELDS}",
    ),
}


@pytest.mark.parametrize(("loader", "because"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_loaders_that_are_left_alone_say_why(loader: Any, because: str) -> None:
    given, choice = share_out(loader, 0, 2, seed=1)
    assert given is loader
    assert str(choice) == f"as given ({because})"


def test_the_new_loader_keeps_what_the_old_one_was_given() -> None:
    def collate(samples: Any) -> Any:
        return samples

    def begin(worker: int) -> None:
        pass

    generator = torch.Generator()
    old = DataLoader(
        DATA,
        batch_size=3,
        shuffle=True,
        num_workers=2,
        collate_fn=collate,
        drop_last=True,
        timeout=7,
        worker_init_fn=begin,
        multiprocessing_context="fork",
        generator=generator,
        prefetch_factor=5,
        persistent_workers=True,
        in_order=False,
    )
    new, choice = share_out(old, 1, 4, seed=9)
    for name in ("dataset", "batch_size", "num_workers", "collate_fn", "drop_last", "timeout", "worker_init_fn", "generator"):
        assert getattr(new, name) == getattr(old, name), name
    for name in ("multiprocessing_context", "prefetch_factor", "persistent_workers", "in_order", "pin_memory"):
        assert getattr(new, name) == getattr(old, name), name
    assert str(choice) == (
        "shared out (each rank takes its turn among 4 in one permutation an epoch (seed 9); no sample is repeated or lost)"
    )


def test_a_loader_in_order_has_no_seed_to_tell() -> None:
    _, choice = share_out(DataLoader(DATA, batch_size=2), 0, 2, seed=9)
    assert str(choice) == "shared out (each rank takes its turn among 2 in one order; no sample is repeated or lost)"


def test_the_seed_is_the_generators_where_there_is_one_and_else_torchs() -> None:
    torch.manual_seed(123)
    assert seed_of(DataLoader(DATA)) == 123
    assert seed_of([1]) == 123
    assert seed_of(DataLoader(DATA, generator=torch.Generator().manual_seed(4))) == 4
