"""Loaders on two ranks: of different lengths, without a length, shared out, or with samplers of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

from distributed.conftest import Both
from distributed.jobs import Deal, Indices, Job, Trained, assert_equals_one_process, batch_of, trained
from halfstep import Engine
from halfstep.errors import DataError
from parity.by_hand import Batch, tiny_model, weighted_loss

RAGGED = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0, 5.0, 8.0]
SINGLES = [[[0], [1], [2, 3], [4], [5]], [[6, 7], [8], [9]]]
"""Five micro-batches on rank 0, three on rank 1."""


class Stream(IterableDataset[Batch]):
    """Micro-batches of which nobody knows how many there are."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def train_on(kind: str, job: Job, parts: Sequence[Sequence[Indices]], asked: dict[str, Any]) -> Trained:
    """Train on this rank's part, which a loader yields."""
    batches = [batch_of(job, indices) for indices in parts[dist.get_rank()]]
    loader = batches if kind == "list" else DataLoader(Stream(batches), batch_size=None)
    return trained(job, lambda engine: engine.updates(loader, **asked))


def windows_of(parts: Sequence[Sequence[Indices]], accumulate: int, tail: str, epochs: int) -> list[Deal]:
    """How the micro-batches of each rank become windows, by the words of the documentation."""
    by_rank = []
    for part in parts:
        full = len(part) - len(part) % accumulate
        epoch = part[:full] if tail == "drop" else part
        runs = [epoch * epochs] if tail == "carry" else [epoch] * epochs
        by_rank.append([[run[i : i + accumulate] for i in range(0, len(run), accumulate)] for run in runs])
    return [list(deal) for runs in zip(*by_rank, strict=True) for deal in zip_longest(*runs, fillvalue=[])]


@pytest.mark.parametrize("kind", ["list", "stream"])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("tail", ["step", "carry", "drop"])
def test_loaders_of_different_lengths_make_the_windows_of_one_process(both: Both, kind: str, accumulate: int, tail: str) -> None:
    job = Job(windows=windows_of(SINGLES, accumulate, tail, 2), weights=RAGGED, given={"accumulate": accumulate, "tail": tail})
    ranks = both(train_on, kind, job, SINGLES, {"epochs": 2})
    assert_equals_one_process(job, ranks)
    assert ranks[0].choices["sampler"].startswith("as given (")
    assert ranks[0].kept["position"]["epoch"] == ranks[1].kept["position"]["epoch"] == 2


@pytest.mark.parametrize("empty", [0, 1])
@pytest.mark.parametrize("tail", ["step", "carry"])
@pytest.mark.parametrize("epochs", [2, None])
def test_a_rank_whose_loader_is_always_empty(both: Both, empty: int, tail: str, epochs: int | None) -> None:
    parts: list[list[list[int]]] = [SINGLES[0], SINGLES[0]]
    parts[empty] = []
    asked = {"epochs": epochs, "max_updates": None if epochs else 5}
    windows = windows_of(parts, 2, tail, 2)[: None if epochs else 5]
    job = Job(windows=windows, weights=RAGGED, given={"accumulate": 2, "tail": tail})
    assert_equals_one_process(job, both(train_on, "list", job, parts, asked))


def test_max_updates_ends_all_ranks_at_once_also_in_the_middle_of_an_epoch(both: Both) -> None:
    job = Job(windows=windows_of(SINGLES, 2, "step", 1)[:2], weights=RAGGED, given={"accumulate": 2})
    assert_equals_one_process(job, both(train_on, "stream", job, SINGLES, {"epochs": None, "max_updates": 2}))


def error_of_an_empty_loader(tail: str) -> str:
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=weighted_loss, precision="fp32", accumulate=2, tail=tail)
    with pytest.raises(DataError) as error:
        list(engine.updates([]))
    with pytest.raises(DataError):
        engine.update([])
    return str(error.value)


@pytest.mark.parametrize("tail", ["step", "carry", "drop"])
def test_loaders_that_are_empty_on_all_ranks_are_a_sentence_on_all(both: Both, tail: str) -> None:
    first, second = both(error_of_an_empty_loader, tail)
    assert first == second
    assert first.startswith("The list yielded ")


class Seen:
    """An engine's loss that notes which samples it saw; each sample holds its own number."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        self.batches.append([int(value) for value in x.reshape(-1)])
        return model(x.reshape(-1, 1)).square().mean()


def seen_in_epochs(make: Callable[[TensorDataset], DataLoader[Any]], num_samples: int, seed: int) -> tuple[Any, str]:
    """Which samples this rank saw, batch by batch, in each of two epochs; and what was decided."""
    torch.manual_seed(seed + dist.get_rank())  # ranks need not have the same seed
    model, seen = nn.Linear(1, 1), Seen()
    engine = Engine(model, SGD(model.parameters(), lr=0.0), loss=seen, precision="fp32")
    loader = make(TensorDataset(torch.arange(num_samples, dtype=torch.float32).reshape(-1, 1)))
    epochs = []
    for _ in range(2):
        seen.batches = []
        list(engine.updates(loader))
        epochs.append(seen.batches)
    return epochs, str(engine.choices["sampler"])


def shuffled(data: TensorDataset) -> DataLoader[Any]:
    return DataLoader(data, batch_size=3, shuffle=True)


def in_order(data: TensorDataset) -> DataLoader[Any]:
    return DataLoader(data, batch_size=3)


def one_by_one(data: TensorDataset) -> DataLoader[Any]:
    return DataLoader(data, batch_size=None, shuffle=True)


def with_workers(data: TensorDataset) -> DataLoader[Any]:
    return DataLoader(data, batch_size=3, shuffle=True, num_workers=1, multiprocessing_context="fork")


def with_generator(data: TensorDataset) -> DataLoader[Any]:
    return DataLoader(data, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(17))


@pytest.mark.parametrize("num_samples", [1, 13, 20])
@pytest.mark.parametrize("make", [shuffled, in_order, one_by_one])
def test_a_plain_loader_is_shared_out_without_repeating_or_losing_a_sample(both: Both, make: Any, num_samples: int) -> None:
    (first, choice), (second, _) = both(seen_in_epochs, make, num_samples, 5)
    assert choice.startswith("shared out (each rank takes its turn among 2 in one ")
    for ours, theirs in zip(first, second, strict=True):
        flat = [list(chain.from_iterable(batches)) for batches in (ours, theirs)]
        assert sorted(flat[0] + flat[1]) == list(range(num_samples))
        assert 0 <= len(flat[0]) - len(flat[1]) <= 1
        assert all(len(batch) == (1 if make is one_by_one else 3) for batches in (ours, theirs) for batch in batches[:-1])


@pytest.mark.parametrize("make", [shuffled, with_workers])
def test_each_epoch_is_another_permutation_and_the_seed_is_told(both: Both, make: Any) -> None:
    (first, choice), (second, same) = both(seen_in_epochs, make, 20, 5)
    assert choice == same
    assert choice.endswith("in one permutation an epoch (seed 5); no sample is repeated or lost)")
    assert first[0] != first[1]
    assert second[0] != second[1]


def test_the_seed_of_a_loaders_own_generator_decides(both: Both) -> None:
    (one, choice), _ = both(seen_in_epochs, with_generator, 20, 5)
    (other, _), _ = both(seen_in_epochs, with_generator, 20, 6)
    (unlike, _), _ = both(seen_in_epochs, shuffled, 20, 6)
    assert "(seed 17)" in choice
    assert one == other != unlike


def test_a_loader_in_order_stays_in_order(both: Both) -> None:
    (first, _), (second, _) = both(seen_in_epochs, in_order, 8, 5)
    assert first == [[[0, 2, 4], [6]]] * 2
    assert second == [[[1, 3, 5], [7]]] * 2


def distributed(data: TensorDataset) -> DataLoader[Any]:
    return DataLoader(data, batch_size=3, sampler=DistributedSampler(data, seed=3))


def batches_of_distributed(data: TensorDataset) -> DataLoader[Any]:
    return DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data, seed=3), 3, drop_last=False))


class Halves:
    """A batch sampler of the user's: each rank has its half, and it is told the epoch."""

    def __init__(self, num_samples: int) -> None:
        half = num_samples // 2
        self.mine = range(half * dist.get_rank(), half * (dist.get_rank() + 1))
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        yield list(self.mine) if self.epoch == 0 else list(reversed(self.mine))


def own_batches(data: TensorDataset) -> DataLoader[Any]:
    return DataLoader(data, batch_sampler=Halves(len(data)))


def replacement(data: TensorDataset) -> DataLoader[Any]:
    return DataLoader(data, batch_size=3, sampler=RandomSampler(data, replacement=True, num_samples=6))


@pytest.mark.parametrize("make", [distributed, batches_of_distributed])
def test_a_distributed_sampler_is_left_alone_and_told_the_epoch(both: Both, make: Any) -> None:
    (first, choice), (second, _) = both(seen_in_epochs, make, 12, 5)
    assert choice.startswith("as given (it brings its own ")
    for epoch in range(2):
        for rank, seen in enumerate((first, second)):
            plain = DistributedSampler(list(range(12)), num_replicas=2, rank=rank, seed=3)
            plain.set_epoch(epoch)
            assert list(chain.from_iterable(seen[epoch])) == list(plain)
    assert first[0] != first[1]


def test_a_batch_sampler_of_the_users_is_left_alone_and_told_the_epoch(both: Both) -> None:
    (first, choice), (second, _) = both(seen_in_epochs, own_batches, 8, 5)
    assert choice == "as given (it brings its own batch sampler, a Halves: it must yield this rank's part)"
    assert (first, second) == ([[[0, 1, 2, 3]], [[3, 2, 1, 0]]], [[[4, 5, 6, 7]], [[7, 6, 5, 4]]])


def test_a_sampler_that_draws_with_replacement_is_left_alone(both: Both) -> None:
    (_, choice), _ = both(seen_in_epochs, replacement, 8, 5)
    assert choice == "as given (it draws its samples by itself (`replacement` or `num_samples`): it must yield this rank's part)"


def choice_of_auto(parts: Sequence[int], accumulate: int) -> tuple[str, str]:
    """What "auto" takes where this rank has so many micro-batches in all."""
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=weighted_loss, accumulate=accumulate)
    job = Job(windows=[], weights=RAGGED)
    batches = [batch_of(job, [number]) for number in range(parts[dist.get_rank()])]
    list(engine.updates(batches))
    return str(engine.choices["precision"].value), engine.choices["precision"].reason


@pytest.mark.parametrize("parts", [[4, 4], [1, 5], [5, 1], [4, 0], [0, 4]], ids=str)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_auto_is_what_rank_0_chose_on_all_ranks(both: Both, parts: list[int], accumulate: int) -> None:
    first, second = both(choice_of_auto, parts, accumulate)
    assert first == second
    assert ("forward and backward" in first[1]) == (parts[0] > 0), "rank 0 measures the model where it has a micro-batch"
