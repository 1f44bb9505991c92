"""Who makes batches, and how they reach the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import pytest
import torch
from torch.utils.data import Dataset

import halfstep.train.loading
from halfstep.errors import DataError
from halfstep.train.loading import batch_loader, choose_workers, of_worker, transfer
from halfstep.train.order import RankBatches
from halfstep.train.windows import Batch, Windows


class Made(Dataset[Batch]):
    """Data whose batches take as long as the clock says."""

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        return {"input_ids": torch.tensor(list(indices))}


@pytest.fixture
def takes_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What making a batch takes, as the first element."""
    seconds, now = [0.0], [0.0]

    def clock() -> float:
        now[0] += seconds[0]
        return now[0]

    monkeypatch.setattr(halfstep.train.loading.time, "perf_counter", clock)
    return seconds


def chosen(device: str, ranks: int = 1) -> tuple[int, str]:
    choice = choose_workers(Made(), [[0]] * 9, device=device, cores=12, ranks=ranks, asked=None)
    return choice.value, choice.reason


def test_batches_that_are_made_at_once_need_no_workers(takes_s: list[float]) -> None:
    takes_s[0] = 0.0005
    told = "a micro-batch is made in 0.5 ms (median of 5): less than another process takes to hand it over"
    assert chosen("cuda") == (0, told)


def test_slow_batches_get_the_cores_beside_a_device(takes_s: list[float]) -> None:
    takes_s[0] = 0.03
    told = "a micro-batch is made in 30 ms (median of 5), beside the device; as many as 12 cores leave to 4 ranks, at most 8"
    assert chosen("cuda", ranks=4) == (2, told)
    assert chosen("cuda")[0] == 8


def test_slow_batches_get_no_workers_where_the_cores_train(takes_s: list[float]) -> None:
    takes_s[0] = 0.03
    told = "a micro-batch is made in 30 ms (median of 5), on the cores that train: another process would take them away"
    assert chosen("cpu") == (0, told)


def test_what_was_asked_for_is_taken() -> None:
    assert choose_workers(Made(), [[0]], device="cpu", cores=2, ranks=1, asked=3).value == 3


def test_the_way_to_the_device_is_told() -> None:
    told = [str(transfer(device, workers)) for device, workers in (("cpu", 0), ("cuda", 4), ("mps", 0))]
    assert told == [
        "none (batches are made where they are used; one batch made ahead, by this process)",
        "pinned, non-blocking (the copy runs while the device computes; 8 batches made ahead)",
        "non-blocking (pinned memory is CUDA's; one batch made ahead, by this process)",
    ]


def test_workers_hand_out_the_same_batches_in_the_same_order() -> None:
    samples = Windows(numpy.arange(100, dtype=numpy.uint8), 10)
    order = RankBatches(len(samples), global_batch=4, micro=2, seed=0)
    here, beside = (batch_loader(samples, order, device=torch.device("cpu"), workers=workers) for workers in (0, 2))
    for mine, theirs in zip(here, beside, strict=True):
        assert torch.equal(mine["input_ids"], theirs["input_ids"])


class Torn(Dataset[Batch]):
    """Every batch of it has a fault."""

    def __len__(self) -> int:
        return 2

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        raise DataError("images/1.png is not a picture that opens: it breaks off")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fault_in_the_data_is_one_sentence_from_any_process(workers: int) -> None:
    loader = batch_loader(Torn(), [[0], [1]], device=torch.device("cpu"), workers=workers)
    with pytest.raises(DataError) as error:
        next(iter(loader))
    assert str(of_worker(error.value)) == "images/1.png is not a picture that opens: it breaks off"
