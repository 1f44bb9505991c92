"""When memory runs out on one rank: early all halve, later that rank alone, and the update is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.conftest import Both
from distributed.jobs import Deal, Job, Trained, assert_equals_one_process, batch_of, mine, trained
from distributed.ranks import Ended
from halfstep import Engine
from halfstep.errors import DeviceError
from parity.by_hand import Batch, weighted_loss

RAGGED = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0, 5.0, 8.0]
DEAL: Deal = [[[0, 1, 2, 3], [4, 5]], [[6, 7], [8, 9, 10, 11]]]
LARGE_FIRST: Deal = [[[0, 1, 2, 3], [4, 5]], [[8, 9, 10, 11], [6, 7]]]
ALONE: Deal = [[], [[8, 9], [0, 1, 2, 3]]]
SINGLES: Deal = [[[0], [1], [2]], [[4, 5, 6, 7]]]
PLENTY = 99


class RunsOutInBackward(torch.autograd.Function):
    """The identity, whose backward finds no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")


@dataclass(kw_only=True)
class Memory:
    """A loss that runs out of memory where a micro-batch has more samples than fit."""

    fits: int = PLENTY
    in_backward: bool = False

    def __post_init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        self.sizes.append(len(batch.x))
        runs_out = len(batch.x) > self.fits
        if runs_out and not self.in_backward:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        total, weight = weighted_loss(model, batch)
        return (RunsOutInBackward.apply(total) if runs_out else total), weight


@dataclass(frozen=True, kw_only=True)
class Short:
    """A training in which memory is short on a rank, from a window on.

    Attributes:
        job: the training.
        rank: where memory is short; None for nowhere.
        window: from which window on, counted from 0.
        fits: samples that then fit.
        in_backward: whether backward runs out; else the forward.
    """

    job: Job
    rank: int
    window: int
    fits: int = 2
    in_backward: bool = False


def train_short(short: Short) -> tuple[Trained, int, list[list[int]]]:
    """What is left, in how many parts micro-batches are computed, and the sizes that were tried in each window."""
    memory, job, sizes = Memory(in_backward=short.in_backward), short.job, []
    rank = dist.get_rank() if dist.is_initialized() else None

    def run(engine: Engine) -> list[Any]:
        updates = []
        for number, deal in enumerate(job.windows):
            memory.sizes = []
            memory.fits = short.fits if rank == short.rank and number >= short.window else PLENTY
            updates.append(engine.update([batch_of(job, each) for each in mine(deal)]))
            sizes.append(memory.sizes)
        return updates

    left = trained(replace(job, given={**job.given, "loss": memory}), run)
    return left, left.kept["micro_batch_parts"], sizes


def assert_the_same_result(short: Short, ends: Sequence[tuple[Trained, int, list[list[int]]]]) -> None:
    ranks = [left for left, _, _ in ends]
    for left in ranks:
        assert all(told["applied"] for told in left.told)
    assert_equals_one_process(short.job, ranks)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_in_the_first_two_windows_all_ranks_halve(both: Both, rank: int, window: int, in_backward: bool) -> None:
    job = Job(windows=[DEAL, ALONE, DEAL, DEAL] if rank else [DEAL, DEAL, DEAL], weights=RAGGED, given={"clip_norm": 0.1})
    short = Short(job=job, rank=rank, window=window, in_backward=in_backward)
    ends = both(train_short, short)
    assert [parts for _, parts, _ in ends] == [2, 2]
    assert ends[0][2][-1] == [2, 2, 1, 1], "rank 0 halves too, whoever ran out"
    assert ends[1][2][-1] == [1, 1, 2, 2]
    assert_the_same_result(short, ends)


def test_a_rank_of_single_samples_or_without_data_goes_on_while_another_halves(both: Both) -> None:
    job = Job(windows=[SINGLES, ALONE, SINGLES, SINGLES], weights=RAGGED)
    short = Short(job=job, rank=1, window=0)
    ends = both(train_short, short)
    assert [parts for _, parts, _ in ends] == [2, 2]
    assert_the_same_result(short, ends)
    other = Short(job=Job(windows=[ALONE, ALONE, DEAL, DEAL], weights=RAGGED), rank=1, window=0)
    assert_the_same_result(other, both(train_short, other))


def test_memory_that_runs_out_twice_is_quartered_on_all_ranks(both: Both) -> None:
    short = Short(job=Job(windows=[DEAL, DEAL, DEAL], weights=RAGGED, given={"precision": "bf16"}), rank=1, window=0, fits=1)
    ends = both(train_short, short)
    assert [parts for _, parts, _ in ends] == [4, 4]
    assert_the_same_result(short, ends)


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_later_a_rank_halves_alone_where_it_has_not_begun_to_reduce(both: Both, in_backward: bool) -> None:
    windows = [LARGE_FIRST, LARGE_FIRST, LARGE_FIRST, ALONE, LARGE_FIRST]
    short = Short(job=Job(windows=windows, weights=RAGGED), rank=1, window=2, in_backward=in_backward)
    ends = both(train_short, short)
    assert [parts for _, parts, _ in ends] == [1, 2]
    assert ends[1][2][2] == [4, 2, 2, 1, 1], "once whole, then in halves"
    assert_the_same_result(short, ends)


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("windows", "given"),
    [([DEAL, DEAL, ALONE, DEAL], {}), ([DEAL, DEAL, DEAL, DEAL], {"find_unused_parameters": True})],
    ids=["the other rank has no data", "parameters may be unused"],
)
def test_in_a_window_that_is_reduced_late_a_rank_halves_alone_up_to_the_last_backward(
    both: Both, windows: list[Deal], given: dict[str, Any], in_backward: bool
) -> None:
    short = Short(job=Job(windows=windows, weights=RAGGED, given=given), rank=1, window=2, in_backward=in_backward)
    ends = both(train_short, short)
    assert [parts for _, parts, _ in ends] == [1, 2]
    assert_the_same_result(short, ends)


def test_ranks_go_on_looking_for_a_size_until_something_was_counted(both: Both) -> None:
    """The reference of the weights is fixed by all ranks together; a window that one of them redoes alone would ask again."""
    masked: Deal = [[[0], [1]], [[2], [3]]]
    job = Job(windows=[masked, masked, masked, DEAL, DEAL], weights=[0.0, 0.0, 0.0, 0.0, *RAGGED[4:]])
    short = Short(job=job, rank=1, window=3)
    ends = both(train_short, short)
    assert [parts for _, parts, _ in ends] == [2, 2]
    assert [told["applied"] for told in ends[0][0].told] == [False, False, False, True, True]
    assert_equals_one_process(job, [left for left, _, _ in ends])


def error_of_one_sample(short: Short) -> str:
    with pytest.raises(DeviceError) as error:
        train_short(short)
    return str(error.value)


def test_one_sample_that_does_not_fit_is_the_same_sentence_on_all_ranks(both: Both) -> None:
    told = both(error_of_one_sample, Short(job=Job(windows=[DEAL], weights=RAGGED), rank=1, window=0, fits=0))
    assert (
        told
        == [
            "Out of memory on rank 1 with micro-batches of one sample. Use a smaller model, shorter samples, "
            "`checkpoint_activations=True`, or a lower precision."
        ]
        * 2
    )


LATE = (
    "Out of memory on rank 1 in the last micro-batch of a window, which cannot be computed again: its backward reduces the "
    "gradients with the other ranks. Use smaller micro-batches, or put the longest samples first: in the first 2 updates the "
    "ranks look for a size that fits."
)


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_out_of_memory_while_gradients_are_reduced_ends_all_ranks_with_its_sentence(
    started: Callable[..., list[Ended]], in_backward: bool
) -> None:
    job = Job(windows=[DEAL] * 4, weights=RAGGED)
    other, failed = started(train_by_env, Short(job=job, rank=1, window=2, in_backward=in_backward), timeout_s=30.0)
    assert (failed.error, failed.message) == ("DeviceError", LATE)
    assert (other.error, other.message) == ("RunStopped", f"Rank 1 failed, and with it the run: {LATE}")


def train_by_env(short: Short) -> Any:
    """The group is made by the engine, as under torchrun; the samples are dealt out by it afterwards."""
    from halfstep.distributed import connect

    connect(torch.device("cpu"))
    return train_short(short)
