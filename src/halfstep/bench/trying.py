"""One trial of a row, in a process of its own: the engine and data of `halfstep train`, for a few updates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch

from halfstep.bench.row import Trial
from halfstep.config.load import load
from halfstep.engine.halving import is_out_of_memory
from halfstep.errors import DeviceError
from halfstep.measure.clock import synchronize
from halfstep.measure.memory import memory_use, reset_peak
from halfstep.train.build import build_engine, build_loader
from halfstep.train.job import prepare

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
    except (DeviceError, RuntimeError) as error:
        cause = error.__cause__ or error
        if is_out_of_memory(error) or is_out_of_memory(cause) or str(error).startswith("Out of memory"):
            return Trial(failed="does not fit: out of memory")
        if isinstance(error, DeviceError):
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
    use, on_host = memory_use(job.device), job.device.type == "cpu"
    peak = use.peak_allocated_bytes
    return Trial(
        seconds=tuple(seconds),
        weights=tuple(weights),
        losses=tuple(losses),
        allocated_bytes=peak - before if on_host and peak is not None else peak,
        reserved_bytes=None if on_host else use.peak_reserved_bytes,
    )
