"""Batches on their way to the device: who makes them, and where they wait."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from halfstep.config.choice import ASKED_FOR, Choice
from halfstep.errors import DataError
from halfstep.train.windows import Batch, as_it_is

HANDED_OVER_S = 2e-3
"""Seconds of making a batch below which a process of its own, which has to hand it over, gains nothing."""
MOST_WORKERS = 8
BATCHES_AHEAD = 2
"""Of each worker: one that is wanted next, and one that is being made."""
TRIALS = 5


def choose_workers(
    samples: Dataset[Batch], batches: Iterable[Sequence[int]], *, device: str, cores: int, ranks: int, asked: int | None
) -> Choice[int]:
    """How many processes beside this one make batches; a few are made here to see what one costs.

    Args:
        samples: the data, which hand out whole batches.
        batches: the indices of each.
        device: the kind of device that computes.
        cores: of the processor, for all ranks on it.
        ranks: how many there are.
        asked: what the user wants; `None` for a choice.
    """
    seconds = median([_seconds(samples, batch) for batch in islice(batches, TRIALS)] or [0.0])
    cost = f"a micro-batch is made in {1e3 * seconds:.2g} ms (median of {TRIALS})"
    if asked is not None:
        return Choice(value=asked, reason=ASKED_FOR)
    if seconds < HANDED_OVER_S:
        return Choice(value=0, reason=f"{cost}: less than another process takes to hand it over")
    if device == "cpu":
        return Choice(value=0, reason=f"{cost}, on the cores that train: another process would take them away")
    workers = max(1, min(MOST_WORKERS, cores // ranks - 1))
    return Choice(value=workers, reason=f"{cost}, beside the device; as many as {cores} cores leave to {ranks} ranks, at most 8")


def _seconds(samples: Dataset[Batch], batch: Sequence[int]) -> float:
    began = time.perf_counter()
    samples.__getitems__(batch)  # type: ignore[attr-defined]  # every data set here has it
    return time.perf_counter() - began


def transfer(device: str, workers: int) -> Choice[str]:
    """How batches reach the device."""
    ahead = f"{workers * BATCHES_AHEAD} batches made ahead" if workers else "one batch made ahead, by this process"
    if device == "cpu":
        return Choice(value="none", reason=f"batches are made where they are used; {ahead}")
    if device == "cuda":
        return Choice(value="pinned, non-blocking", reason=f"the copy runs while the device computes; {ahead}")
    return Choice(value="non-blocking", reason=f"pinned memory is CUDA's; {ahead}")


def of_worker(error: DataError) -> DataError:
    """The error as it was raised, where it comes from another process with all that torch writes around it."""
    lines = str(error).strip().splitlines()
    return DataError(lines[-1].partition("DataError: ")[2]) if "DataLoader worker process" in lines[0] else error


def batch_loader(samples: Dataset[Batch], batches: Iterable[Any], *, device: torch.device, workers: int) -> DataLoader[Batch]:
    """The batches of these indices, in their order."""
    return DataLoader(
        samples,
        batch_sampler=batches,
        collate_fn=as_it_is,
        pin_memory=device.type == "cuda",
        num_workers=workers,
        prefetch_factor=BATCHES_AHEAD if workers else None,
        persistent_workers=workers > 0,
    )
