"""Loaders of every kind: sized or not, with samplers that want to know the epoch, empty, or read already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from halfstep import Engine
from halfstep.engine.reading import read_ahead, set_epoch
from halfstep.errors import DataError, ModelError

NO_MICRO_BATCH = (
    "yielded no micro-batch; training needs at least one. Is the data set empty, smaller than a batch with `drop_last=True`, or "
    "an iterator that has been read already?"
)


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)).unsqueeze(1))


def mean(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0] if isinstance(batch, (list, tuple)) else batch).square().mean()


def engine(**given: Any) -> Engine:
    model = nn.Linear(1, 1)
    return Engine(model, SGD(model.parameters(), lr=1e-4), loss=given.pop("loss", mean), precision="fp32", **given)


class Stream(IterableDataset[Tensor]):
    """Data without a length."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(i)]) for i in range(self.count))


def test_an_iterable_data_set_needs_no_length() -> None:
    loader = DataLoader(Stream(7), batch_size=2)
    updates = list(engine(accumulate=3).updates(loader, epochs=2))
    assert [update.micro_batches for update in updates] == [3, 1, 3, 1]


def test_data_set_sampler_batch_sampler_and_loader_are_told_the_epoch() -> None:
    class Listening(SequentialSampler):
        def __init__(self, source: Any) -> None:
            super().__init__(source)
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    class ListeningBatches(BatchSampler):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    sampler, batches, stream = Listening(numbers(4)), ListeningBatches(SequentialSampler(numbers(4)), 2, False), Stream(4)
    for loader in (
        DataLoader(numbers(4), batch_size=2, sampler=sampler),
        DataLoader(numbers(4), batch_sampler=batches),
        DataLoader(stream, batch_size=2),
    ):
        list(engine().updates(loader, epochs=3))
    assert sampler.epochs == batches.epochs == stream.epochs == [0, 1, 2]


def test_a_distributed_sampler_shuffles_each_epoch_anew() -> None:
    """The call that is easily forgotten by hand."""
    sampler: Sampler[int] = DistributedSampler(numbers(8), num_replicas=1, rank=0, shuffle=True, seed=3)
    loader = DataLoader(numbers(8), batch_size=8, sampler=sampler)
    orders: list[list[float]] = []

    def remembered(model: nn.Module, batch: Any) -> Tensor:
        orders.append(batch[0].flatten().tolist())
        return mean(model, batch)

    list(engine(loss=remembered).updates(loader, epochs=3))
    assert [sorted(order) for order in orders] == [sorted(orders[0])] * 3
    assert len({tuple(order) for order in orders}) == 3


def test_epochs_go_on_counting_from_one_call_to_the_next() -> None:
    stream, trainer = Stream(2), engine()
    for _ in range(2):
        list(trainer.updates(DataLoader(stream), epochs=2))
    assert stream.epochs == [0, 1, 2, 3]


def test_a_loader_without_listeners_is_told_nothing() -> None:
    assert not set_epoch([1, 2], 0)


NOTHING = [
    ([], "list"),
    (iter([]), "list_iterator"),
    (DataLoader(Stream(0)), "DataLoader"),
    (DataLoader(numbers(1), 2, drop_last=True), "DataLoader"),
]


@pytest.mark.parametrize(("loader", "kind"), NOTHING)
def test_a_loader_that_yields_nothing_is_told(loader: Any, kind: str) -> None:
    with pytest.raises(DataError) as told:
        list(engine().updates(loader))
    assert str(told.value) == f"The {kind} {NO_MICRO_BATCH}"


def test_an_update_of_no_micro_batch_is_told() -> None:
    with pytest.raises(DataError) as told:
        engine().update([])
    assert str(told.value) == f"The list {NO_MICRO_BATCH}"


def test_an_iterator_that_has_been_read_is_told_in_the_second_epoch() -> None:
    trainer = engine()
    updates = trainer.updates(iter([torch.ones(1, 1)]), epochs=2)
    assert next(updates).applied
    with pytest.raises(DataError) as told:
        next(updates)
    assert str(told.value) == f"The list_iterator {NO_MICRO_BATCH}"


@pytest.mark.parametrize(("batch", "kind"), [(torch.ones(3, 1), "Tensor"), ({"x": torch.ones(3, 1)}, "dict")])
def test_one_micro_batch_in_place_of_a_window_is_told(batch: Any, kind: str) -> None:
    with pytest.raises(DataError) as told:
        engine().update(batch)
    assert str(told.value) == f"`update` was given one {kind}; it takes the micro-batches of a window: `engine.update([batch])`."


def test_an_engine_without_a_loss_makes_windows_only() -> None:
    with pytest.raises(ModelError) as told:
        engine(loss=None).update([torch.ones(1, 1)])
    assert str(told.value) == "The engine has no loss function: give it `loss=`, or call backward yourself in `engine.window()`."


def test_a_loader_is_read_one_micro_batch_ahead_and_no_more() -> None:
    read: list[int] = []

    def source() -> Iterator[Tensor]:
        for number in range(6):
            read.append(number)
            yield torch.ones(1, 1)

    updates = engine(accumulate=2).updates(source())
    next(updates)
    assert read == [0, 1, 2]


def test_only_the_last_of_a_feed_is_marked() -> None:
    assert list(read_ahead("abc")) == [("a", False), ("b", False), ("c", True)]
    assert list(read_ahead("")) == []


def test_a_run_of_so_many_updates_ends_in_the_middle_of_an_epoch() -> None:
    trainer = engine()
    assert len(list(trainer.updates([torch.ones(1, 1)] * 5, epochs=None, max_updates=12))) == 12
    assert list(trainer.updates([torch.ones(1, 1)] * 5, epochs=None, max_updates=12)) == []
    assert len(list(trainer.updates([torch.ones(1, 1)] * 5, epochs=None, max_updates=15))) == 3


def test_a_call_after_one_that_ended_within_an_epoch_begins_that_epoch_anew() -> None:
    read: list[int] = []

    def watched(model: nn.Module, batch: Any) -> Tensor:
        read.append(int(batch[0]))
        return mean(model, batch)

    made, loader = engine(loss=watched), DataLoader(numbers(3))
    list(made.updates(loader, max_updates=2))
    list(made.updates(loader))
    assert read == [0, 1, 0, 1, 2]


def test_an_error_of_the_loader_reaches_the_caller_and_leaves_autocast_closed() -> None:
    def source() -> Iterator[Tensor]:
        yield torch.ones(1, 1)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(engine(accumulate=4).updates(source()))
    assert not torch.is_autocast_enabled("cpu")
