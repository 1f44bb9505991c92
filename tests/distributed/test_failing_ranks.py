"""When one rank fails, the others end soon and say which one and why."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from distributed.ranks import Ended
from halfstep import Engine
from halfstep.errors import DataError
from parity.by_hand import Batch, micro_batches, tiny_model, weighted_loss

Started = Callable[..., list[Ended]]
GONE = (
    "Another rank is gone without a word: killed, perhaps for want of memory, or ended early. Look at what the other processes "
    "printed last, and at the system's log."
)


def engine_of(loss: Any, **given: Any) -> Engine:
    model = tiny_model()
    return Engine(model, SGD(model.parameters(), lr=0.1), loss=loss, precision="fp32", **given)


class Fails:
    """A loss that raises on one rank in its n-th micro-batch."""

    def __init__(self, rank: int, after: int, error: Exception) -> None:
        self.rank, self.left, self.error = str(rank), after, error

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        self.left -= 1
        if self.left < 0 and os.environ["RANK"] == self.rank:
            raise self.error
        return weighted_loss(model, batch)


def in_updates(rank: int, after: int, error: Exception) -> None:
    list(engine_of(Fails(rank, after, error), accumulate=2).updates(micro_batches(12)))


def in_update(rank: int, after: int, error: Exception) -> None:
    engine = engine_of(Fails(rank, after, error))
    for _ in range(6):
        engine.update(micro_batches(2))


@pytest.mark.parametrize("run", [in_updates, in_update])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("after", [0, 3, 6, 7], ids=lambda after: f"after {after} micro-batches")
def test_an_error_in_one_ranks_loss_is_told_by_the_others(started: Started, run: Any, rank: int, after: int) -> None:
    ends = started(run, rank, after, ValueError("sample 17 has no label"))
    assert (ends[rank].error, ends[rank].message) == ("ValueError", "sample 17 has no label"), "its own error is left as it is"
    other = ends[1 - rank]
    assert (other.error, other.message) == (
        "RunStopped",
        f"Rank {rank} failed, and with it the run: ValueError: sample 17 has no label",
    )


def with_bad_loader() -> None:
    def batches() -> Iterator[Batch]:
        yield from micro_batches(7)
        if os.environ["RANK"] == "1":
            raise DataError("The shard `b.bin` ends in the middle of a sample.")
        yield from micro_batches(7)

    list(engine_of(weighted_loss, accumulate=2).updates(batches()))


def test_an_error_of_one_ranks_loader_is_told_by_the_others(started: Started) -> None:
    first, second = started(with_bad_loader)
    assert second.error == "DataError"
    assert first.message == "Rank 1 failed, and with it the run: The shard `b.bin` ends in the middle of a sample."


def on_all_ranks() -> None:
    engine_of(lambda model, batch: model(batch.x)).update(micro_batches(1))


def test_an_error_that_all_ranks_have_is_each_ranks_own(started: Started) -> None:
    first, second = started(on_all_ranks)
    assert first == second or first.message == second.message
    assert first.message == "The loss has shape (2, 2); reduce it to a scalar with `.sum()` or `.mean()`."


def killed(window: bool) -> None:
    engine = engine_of(weighted_loss)
    for number in range(6):
        if number == 4 and os.environ["RANK"] == "1":
            os._exit(9)
        if window:
            with engine.window() as made:
                made.backward(*weighted_loss(engine.model, micro_batches(1)[0]))
        else:
            engine.update(micro_batches(1))


@pytest.mark.parametrize("window", [False, True], ids=["update", "window"])
def test_a_rank_that_is_killed_is_missed_in_a_sentence(started: Started, window: bool) -> None:
    first, second = started(killed, window)
    assert second.error == "ProcessEnded"
    assert (first.error, first.message) == ("RunStopped", GONE)


class Sometimes(nn.Module):
    """A layer that takes part only where a batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.other = nn.Linear(4, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, take: bool) -> Tensor:
        y: Tensor = self.always(x)
        return self.other(self.sometimes(y)) if take else y


def with_unused(ranks: str, last_only: bool) -> None:
    """Layers that are left out on some ranks, in all micro-batches or in the last one of each window."""
    model = Sometimes()
    is_here = os.environ["RANK"] in ranks

    def loss(called: nn.Module, batch: tuple[Tensor, bool]) -> Tensor:
        return called(*batch).square().mean()

    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=loss, precision="fp32")
    x = torch.randn(3, 4)
    for _ in range(4):
        engine.update([(x, not is_here or last_only), (x, not is_here)])


UNUSED = (
    "`sometimes.weight`, `sometimes.bias`, `other.weight` and others took no part in the last micro-batch of a window "
    "on rank {}, so that the gradients could not be reduced during its backward. Give the engine "
    "`find_unused_parameters=True`, or freeze what is not trained."
)


@pytest.mark.parametrize("last_only", [False, True], ids=["in all micro-batches", "in the last micro-batch"])
def test_parameters_left_out_on_one_rank_are_named(started: Started, last_only: bool) -> None:
    """DDP alone would wait for them, or go on with gradients that were never reduced."""
    first, second = started(with_unused, "1", last_only)
    assert (second.error, second.message) == ("ModelError", UNUSED.format(1))
    assert (first.error, first.message) == ("RunStopped", f"Rank 1 failed, and with it the run: {UNUSED.format(1)}")


def test_parameters_left_out_on_all_ranks_are_named_by_all(started: Started) -> None:
    """Nobody waits here, and DDP alone would have stepped once with unreduced gradients before it said so."""
    for rank, end in enumerate(started(with_unused, "01", False)):
        assert (end.error, end.message) == ("ModelError", UNUSED.format(rank))
