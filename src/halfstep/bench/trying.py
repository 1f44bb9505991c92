"""One trial of a row, in a process of its own: the engine and data of `halfstep train`, for a few updates."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from halfstep.bench.row import Trial
from halfstep.config.load import load
from halfstep.distributed import Group
from halfstep.engine import Engine
from halfstep.engine.halving import is_out_of_memory
from halfstep.engine.update import Update
from halfstep.errors import DeviceError, RunStopped, UsageError
from halfstep.measure.clock import synchronize
from halfstep.measure.memory import memory_use, reset_peak
from halfstep.train.build import build_engine, build_loader, shape_of
from halfstep.train.framed import Framed
from halfstep.train.job import Prepared, prepare
from halfstep.train.loading import batch_loader
from halfstep.train.padded import Padded

if TYPE_CHECKING:
    from halfstep.bench.explaining import Watched

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
        rise: for a range test: the learning rate goes from its `rise`-th part to `rise` times itself, by the same factor each
            update, and a run that cannot go on is an answer.
        explain: find out where the time goes; the times are then no measurement.
    """

    config: str | None
    settings: Sequence[str]
    updates: int
    limit_s: float
    rise: float | None = None
    explain: bool = False


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
    if task.rise is not None:
        _let_rise(engine, task.rise, WARMUP + task.updates)
    watched = _watched(engine) if task.explain else None
    started = last = time.perf_counter()
    seconds, weights, losses = [], [], []
    updates = engine.updates(loader, epochs=None, max_updates=WARMUP + task.updates)
    for update in _while_it_can(updates) if task.rise is not None else updates:
        losses.append(update.loss)
        synchronize(job.device)
        now = time.perf_counter()
        if update.index > WARMUP:
            seconds.append(now - last)
            weights.append(update.weight)
        last = now
        if watched is not None:
            watched.update_ended(update.index - 1)
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
        why=watched.reasons(job.run.precision) if watched is not None else (),
    )


def _watched(engine: Engine) -> Watched:
    """The profiler takes time to import."""
    from halfstep.bench.explaining import Watched

    return Watched(engine)


def _let_rise(engine: Engine, rise: float, updates: int) -> None:
    """Replace the course of the learning rate by one that rises evenly on a logarithmic scale (Smith 2017, section 3.3)."""
    scheduler = engine.schedulers[0]
    assert isinstance(scheduler, LambdaLR)

    def share(applied: int) -> float:
        return float(rise ** (2 * applied / (updates - 1) - 1))

    scheduler.lr_lambdas = [share for _ in scheduler.lr_lambdas]
    for group, base in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
        group["lr"] = base * share(0)


def _while_it_can(updates: Iterator[Update]) -> Iterator[Update]:
    """The updates until the run cannot go on."""
    with suppress(RunStopped):
        yield from updates


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
