"""A job from the configuration to the end report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from halfstep.checkpoint import Checkpoints
from halfstep.config.choice import Choice
from halfstep.config.decisions import is_auto
from halfstep.config.resolve import resolve
from halfstep.config.run import Resolved, Run
from halfstep.config.schema import Written
from halfstep.distributed import Group, connect
from halfstep.distributed.shards import is_sharded, whole_state
from halfstep.engine import Engine
from halfstep.errors import DataError
from halfstep.measure.memory import memory_use
from halfstep.precision.select import explain_without_model
from halfstep.train.allocator import keep_freed_memory
from halfstep.train.book import Book
from halfstep.train.build import (
    build_average,
    build_engine,
    build_held_out,
    build_loader,
    build_model,
    data_choices,
    measure_precision,
    shape_of,
    try_loading,
    try_loss,
    try_own,
    try_packing,
    use_attention,
)
from halfstep.train.determinism import repeatable, seed_ranks_apart
from halfstep.train.early_stop import EarlyStop
from halfstep.train.folder import RunFolder, refuse_used
from halfstep.train.interruption import Interruption
from halfstep.train.judge import Judge
from halfstep.train.launch import fix_cublas_workspace, let_waiting_threads_sleep
from halfstep.train.limits import Limits, Stop
from halfstep.train.loading import of_worker
from halfstep.train.loggers import following, require
from halfstep.train.loop import Loop
from halfstep.train.opening import Opened, alike, device_of, facts_of, open_inputs
from halfstep.train.progress import progress
from halfstep.train.record import Listener
from halfstep.train.saving import Resume, Saver, told_by
from halfstep.train.shards import is_divided, whole_again
from halfstep.train.summary import Ending, Summary, rate_of
from halfstep.train.tasks import unit_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A job whose every value is decided and whose model is on its device; nothing is written yet.

    Attributes:
        resolved: the run with its reasons.
        opened: model configuration, tokenizer and text.
        model: the model.
        device: where it is.
        group: all ranks.
        resume: from where the run goes on; `None` where it begins.
    """

    resolved: Resolved
    opened: Opened
    model: nn.Module
    device: torch.device
    group: Group
    resume: Resume | None = None

    @property
    def run(self) -> Run:
        """The run."""
        return self.resolved.run

    @property
    def planned(self) -> int | None:
        """Applied updates until a limit ends the run; `None` where only the clock does."""
        return self.resolved.planned_updates


def prepare(written: Written, *, started: datetime, resume: Resume | None = None) -> Prepared:
    """Open what the configuration names, decide everything, measure where that is asked for.

    Args:
        written: the configuration.
        started: when.
        resume: from where the run in the configuration's folder goes on; `None` where it is a new one.

    Raises:
        UsageError: what was asked for cannot be run.
    """
    if written.run.folder is not None and resume is None:
        refuse_used(Path(written.run.folder))
    if written.run.deterministic is True:
        fix_cublas_workspace()
    device = device_of(written)
    allocator = keep_freed_memory(device.type)
    opened = open_inputs(written)
    group = connect(device, timeout=_patience(written))
    facts = alike(facts_of(opened, written, device, started), group)
    resolved = resolve(written, opened.inputs, facts)
    require(resolved.run.run.loggers)
    if is_auto(written.precision) and is_divided(resolved.run, group):
        facts = replace(facts, precision=group.from_first(explain_without_model(device)))
        resolved = resolve(written, opened.inputs, facts)
    model, choices = build_model(opened, resolved.run, device, group)
    if resolved.run.data.packing:
        facts = replace(facts, packing=try_packing(model, opened, asked=not is_auto(written.data.packing)))
        resolved = resolve(written, opened.inputs, facts)
    chunk = None if is_auto(written.model.loss_chunk) else resolved.run.model.loss_chunk
    workers = None if is_auto(written.data.workers) else resolved.run.data.workers
    facts = replace(
        facts,
        loss_chunk=try_loss(model, resolved.run, chunk, sharded=is_divided(resolved.run, group)),
        workers=try_loading(opened.train, resolved.run, device, facts.machine.cores, workers),
    )
    resolved = resolve(written, opened.inputs, facts)
    try_own(model, opened.train, resolved.run, device)
    if is_auto(written.precision) and facts.precision is None:
        measured = measure_precision(model, opened.train, resolved.run, group, device)
        resolved = resolve(written, opened.inputs, replace(facts, precision=measured))
        use_attention(model, resolved.run)
    return Prepared(
        resolved=resolved.with_choices(
            {
                **choices,
                **data_choices(opened, resolved.run),
                "memory.allocator": allocator,
                "threads.waiting": let_waiting_threads_sleep(),
            }
        ),
        opened=opened,
        model=model,
        device=device,
        group=group,
        resume=resume,
    )


def _patience(written: Written) -> timedelta | None:
    minutes = written.run.rank_minutes
    return timedelta(minutes=minutes) if isinstance(minutes, float | int) else None


def train(job: Prepared, interruption: Interruption, *, stream: TextIO) -> tuple[Summary, Path]:
    """Train, keep everything in the run's folder, and report. Every rank must call it; only the first one writes.

    Args:
        job: what to train.
        interruption: hears the signals that end the run.
        stream: where progress is shown.

    Returns:
        The end report and the run's folder.

    Raises:
        UsageError: the folder or the data cannot be used.
        RunStopped: the run was under way and cannot go on.
    """
    average = build_average(job.model, job.run)
    product = job.model if average is None else average.module
    engine, choices = build_engine(job.model, job.resolved, average, job.opened.train)
    path, output, settings = Path(job.run.run.folder), job.run.run, job.run.to_dict()
    with Checkpoints(path / "checkpoints", keep=job.run.checkpoint.keep) as checkpoints:
        folder = _folder(job, path, choices, checkpoints)
        if folder is None:
            summary = _train(job, engine, product, None, checkpoints, interruption, lambda after: [])
            _save(job, product, None, "model")
            return summary, path

        def listeners(after: int | None) -> list[Listener]:
            logs = folder.logs(tensorboard=output.tensorboard, after=after)
            return [*logs, *followers, progress(stream, planned_updates=job.planned, unit=unit_of(job.run))]

        with folder.failures_noted(), following(output.loggers, path, settings, partial(_say, stream)) as followers:
            summary = _train(job, engine, product, folder, checkpoints, interruption, listeners)
            _save(job, product, folder, "model")
            checkpoints.wait()
            folder.finish(summary, engine.choices)
    return summary, path


def _folder(job: Prepared, path: Path, choices: dict[str, Choice[Any]], checkpoints: Checkpoints) -> RunFolder | None:
    """The run's folder, which is nobody else's from now on; `None` on ranks that do not write it. Every rank calls it."""
    is_first = job.group.rank == 0
    if job.resume is not None:
        checkpoints.open(job.group)
        return RunFolder.again(path, ranks=job.group.size) if is_first else None
    folder = RunFolder(path, job.resolved.with_choices(choices)) if is_first else None
    checkpoints.open(job.group)
    return folder


def _say(stream: TextIO, sentence: str) -> None:
    stream.write(f"{sentence}\n")


def _train(
    job: Prepared,
    engine: Engine,
    product: nn.Module,
    folder: RunFolder | None,
    checkpoints: Checkpoints,
    interruption: Interruption,
    listeners: Callable[[int | None], list[Listener]],
) -> Summary:
    """Train; `product` is what is judged and kept, the model or its averaged weights.

    Those who listen are made when it is known after which update the run goes on; `None` for a new run.
    """
    limits = Limits(job.run.limits, job.planned, job.run.most_weight)
    book = Book(limits=limits, device=job.device)
    judge = Judge(
        product,
        build_held_out(job.opened, job.run, job.group, engine),
        every=job.run.evaluation.every_updates,
        keep=_keeper(job, product, folder),
    )
    early = EarlyStop(job.run.evaluation.patience) if job.run.evaluation.patience else None
    saver = Saver(
        checkpoints=checkpoints,
        settings=job.run.checkpoint,
        engine=engine,
        book=book,
        judge=judge,
        early=early,
        data=told_by(job.opened.train.samples(shape_of(job.run))),
    )
    seed_ranks_apart(job.run.run.seed, job.group.rank)
    book.listen(listeners(None if job.resume is None else saver.resume(job.resume.update)))
    stop = Stop(interruption, job.run.limits.minutes, job.group, spent_s=book.elapsed_s)
    loader = build_loader(job.opened.train, job.run, job.group, job.device)
    loop = Loop(
        engine=engine,
        loader=loader,
        epochs=job.run.limits.epochs,
        book=book,
        judge=judge,
        early=early,
        limits=limits,
        stop=stop,
        saver=saver,
    )
    try:
        with repeatable(job.run.run.deterministic), _heard(job, engine, folder):
            because = loop.run()
    except DataError as error:
        raise of_worker(error) from error
    finally:
        book.close(engine.ledger)
    return _summary(job, engine, book, judge, because, interrupted=stop.signal is not None)


def _heard(job: Prepared, engine: Engine, folder: RunFolder | None) -> AbstractContextManager[None]:
    """A context that hears the run where that is asked for; what hears it takes time to import."""
    if not job.run.watch:
        return nullcontext()
    from halfstep.train.watched import watched

    return watched(engine, None if folder is None else folder.path)


def _keeper(job: Prepared, product: nn.Module, folder: RunFolder | None) -> Callable[[], object] | None:
    return partial(_save, job, product, folder, "best") if job.run.evaluation.keep_best else None


def _save(job: Prepared, product: nn.Module, folder: RunFolder | None, name: str) -> None:
    """Save the model in the folder of rank 0; every rank calls it, since a sharded one is gathered there."""
    state = whole_state(product, job.group) if is_sharded(product) else None
    if folder is not None:
        whole = product if state is None else whole_again(job.opened, job.run, state)
        folder.save_model(name, whole, job.opened.kept_beside)


def _summary(job: Prepared, engine: Engine, book: Book, judge: Judge, because: str, *, interrupted: bool) -> Summary:
    judged_at_end = judge.last is not None and judge.last.update == book.updates
    return Summary(
        ending=Ending.INTERRUPTED if interrupted else Ending.FINISHED,
        because=because,
        planned_updates=job.planned,
        applied_updates=book.applied,
        skipped=engine.ledger.causes(),
        tokens=book.tokens,
        wall_s=book.elapsed_s,
        rate=rate_of(book.rates),
        final=judge.last if judged_at_end else None,
        best=judge.best,
        train_loss=book.last_loss,
        unigram_nats_per_byte=job.opened.data.unigram_nats_per_byte,
        unit=unit_of(job.run),
        peak_memory_bytes=memory_use(job.device).peak_allocated_bytes,
    )
