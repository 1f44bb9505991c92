"""Time that work really took on its device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

Work = Callable[[], object]
Elapsed = Callable[[Work, torch.device], float]


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished all work given to it; the CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def elapsed_s(work: Work, device: torch.device) -> float:
    """Seconds from the call of `work` until `device` has finished what it was given."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def processor_s(work: Work, device: torch.device) -> float:
    """Seconds that this process computed during `work`: on one thread of a busy CPU, nearer to what it takes alone."""
    synchronize(device)
    start = time.process_time()
    work()
    synchronize(device)
    return time.process_time() - start


def interleaved_s(
    works: Mapping[str, Work],
    device: torch.device,
    *,
    rounds: int,
    warmup_rounds: int = 1,
    before: Work | None = None,
) -> dict[str, list[float]]:
    """Seconds of each of `works` in each of `rounds`, taken in turn.

    Every round runs all of them, each second round backwards, so that a slow moment of the machine or a warm cache
    favours none. The samples of one round belong together: compare them with `stats.paired_ratio`.

    Args:
        works: what to run, by name.
        device: the device that does the work.
        rounds: how often each is timed.
        warmup_rounds: rounds that run first and are not timed.
        before: runs before each work, and is not timed.
    """
    samples: dict[str, list[float]] = {name: [] for name in works}
    with garbage_collection_off():
        for round_index in range(-warmup_rounds, rounds):
            order = list(works) if round_index % 2 == 0 else list(works)[::-1]
            for name in order:
                if before is not None:
                    before()
                seconds = elapsed_s(works[name], device)
                if round_index >= 0:
                    samples[name].append(seconds)
    return samples


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Keep Python's collector out of what is timed, and leave it as it was found."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
