"""One trial of a row, in a process of its own: the engine and data of `halfstep train`, for a few updates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import torch

from halfstep.bench.row import Trial
from halfstep.config.load import load
from halfstep.distributed import Group
from halfstep.engine import Engine
from halfstep.engine.halving import is_out_of_memory
from halfstep.errors import DeviceError, RunStopped, UsageError
from halfstep.measure.clock import synchronize
from halfstep.measure.memory import memory_use, reset_peak
from halfstep.train.build import build_engine, build_loader, shape_of
from halfstep.train.framed import Framed
from halfstep.train.job import Prepared, prepare
from halfstep.train.loading import batch_loader
from halfstep.train.padded import Padded

WARMUP = 2
"""Updates that are not timed: the first makes the optimizer's states, the second runs with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a trial is asked to do.

    Attributes:
        config: file of a `train` configuration; None for the default.
        settings: keys that are set over it, those of the row among them.
        updates: updates to time.
        limit_s: no update is begun after so many seconds.
    """

    config: str | None
    settings: Sequence[str]
    updates: int
    limit_s: float


def attempt(task: Task) -> Trial:
    """Make the updates; running out of memory is an answer."""
    try:
        return _attempt(task)
    except (UsageError, RuntimeError) as error:
        cause = error.__cause__ or error
        if is_out_of_memory(error) or is_out_of_memory(cause) or str(error).startswith("Out of memory"):
            return Trial(failed="does not fit: out of memory")
        if isinstance(error, (DeviceError, RunStopped)):
            return Trial(failed=str(error))
        raise


def _attempt(task: Task) -> Trial:
    more = [f"limits.updates={WARMUP + task.updates}", "evaluation.every_updates=0", "run.tensorboard=false"]
    written = load(None if task.config is None else Path(task.config), [*task.settings, *more])
    torch.manual_seed(0)
    job = prepare(written, started=datetime.now())
    before = (memory_use(job.device).allocated_bytes or 0) - sum(p.numel() * p.element_size() for p in job.model.parameters())
    engine, _ = build_engine(job.model, job.resolved, None, job.opened.train)
    loader = build_loader(job.opened.train, job.run, job.group, job.device)
    reset_peak(job.device)
    _longest_first(engine, job)
    started = last = time.perf_counter()
    seconds, weights, losses = [], [], []
    for update in engine.updates(loader, epochs=None, max_updates=WARMUP + task.updates):
        losses.append(update.loss)
        synchronize(job.device)
        now = time.perf_counter()
        if update.index > WARMUP:
            seconds.append(now - last)
            weights.append(update.weight)
        last = now
        if seconds and now - started > task.limit_s:
            break
    if engine.choices["micro_batch_parts"].value > 1:
        return Trial(failed=f"does not fit: out of memory with micro-batches of {job.run.batch.micro}, until they were halved")
    allocated, reserved = _peaks(job, before)
    return Trial(
        seconds=tuple(seconds),
        weights=tuple(weights),
        losses=tuple(losses),
        allocated_bytes=allocated,
        reserved_bytes=reserved,
    )


def _longest_first(engine: Engine, job: Prepared) -> None:
    """Make an update of the longest samples, where they differ, so that the peak is one that training can reach."""
    samples = job.opened.train.samples(shape_of(job.run))
    if not isinstance(samples, (Padded, Framed)):
        return
    micro, ranks = job.run.batch.micro, job.group.size
    longest = np.argsort(-samples.lengths, kind="stable")[: job.run.batch.global_].tolist()
    mine = [longest[start : start + micro] for start in range(job.group.rank * micro, len(longest), ranks * micro)]
    engine.update(batch_loader(samples, mine, device=job.device, workers=0))


def _peaks(job: Prepared, before: int) -> tuple[int | None, int | None]:
    """The highest allocated and reserved bytes of any rank; None where some rank does not know. Every rank calls it."""
    use, on_host = memory_use(job.device), job.device.type == "cpu"
    peak = use.peak_allocated_bytes
    allocated = peak - before if on_host and peak is not None else peak
    return _most(job.group, allocated), _most(job.group, None if on_host else use.peak_reserved_bytes)


def _most(group: Group, found: int | None) -> int | None:
    unknown, most = group.max(float(found is None), float(found or 0))
    return None if unknown else int(most)
