"""How far a run is: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from halfstep.train.record import EvaluationRecord, Listener, UpdateRecord

SECONDS_BETWEEN_LINES = 5.0


def progress(stream: TextIO, *, planned_updates: int | None, unit: str = "tokens") -> Listener:
    """A bar if the stream is a terminal, else lines.

    Args:
        stream: where it is shown.
        planned_updates: applied updates until the end; `None` where nobody knows.
        unit: what the run counts.
    """
    kind: type[Bar | Lines] = Bar if stream.isatty() else Lines
    return kind(stream, planned_updates=planned_updates, unit=unit)


class Lines:
    """A plain line for the first update, then every few seconds, then for the last; one for each evaluation.

    Args:
        stream: where they go.
        planned_updates: applied updates until the end; `None` where nobody knows.
        unit: what the run counts.
        clock: seconds, ever growing.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        planned_updates: int | None,
        unit: str = "tokens",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._planned, self._unit, self._clock = stream, planned_updates, unit, clock
        self._next = clock()
        self._unsaid: UpdateRecord | None = None

    def on_update(self, record: UpdateRecord) -> None:
        """Say the update if the time has come, or if it was skipped."""
        self._unsaid = record
        if self._clock() >= self._next or not record.entry.applied:
            self._say()

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Say the evaluation."""
        self._say()
        self._write(evaluation_text(record))

    def close(self) -> None:
        """Say the last update if it was not said yet."""
        self._say()

    def _say(self) -> None:
        if self._unsaid is None:
            return
        self._write(f"{position_text(self._unsaid, self._planned)}, {update_text(self._unsaid, self._unit)}")
        self._unsaid = None
        self._next = self._clock() + SECONDS_BETWEEN_LINES

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class Bar:
    """A bar with loss, rate, time left and memory.

    Args:
        stream: the terminal.
        planned_updates: applied updates until the end; `None` where nobody knows.
        unit: what the run counts.
    """

    def __init__(self, stream: TextIO, *, planned_updates: int | None, unit: str = "tokens") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._planned, self._unit = planned_updates, unit
        self._progress = Progress(
            TextColumn("{task.fields[position]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[values]}"),
            console=Console(file=stream),
            redirect_stdout=False,
            redirect_stderr=False,
            expand=True,
        )
        self._task = self._progress.add_task("train", total=1.0, position="first update", values="")
        self._progress.start()

    def on_update(self, record: UpdateRecord) -> None:
        """Move the bar."""
        self._progress.update(
            self._task,
            completed=record.done,
            position=position_text(record, self._planned),
            values=update_text(record, self._unit),
        )

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Leave a line above the bar."""
        self._progress.console.print(evaluation_text(record), highlight=False)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


def position_text(record: UpdateRecord, planned_updates: int | None) -> str:
    """Which update it is, of how many."""
    return f"update {record.entry.index:,}" + ("" if planned_updates is None else f" of {planned_updates:,}")


def update_text(record: UpdateRecord, unit: str) -> str:
    """What the update was: loss, rate, time left, memory; or why it was skipped."""
    entry = record.entry
    loss = f"loss {entry.loss:.3f}" if entry.applied else f"skipped: {entry.cause}"
    memory = "memory unknown" if record.memory_bytes is None else f"{record.memory_bytes / 1e9:.2f} GB"
    return f"{loss}, {record.tokens_per_s:,.0f} {unit}/s, {time_left_text(record)} left, {memory}"


def time_left_text(record: UpdateRecord) -> str:
    """Hours, minutes and seconds until the end, if it goes on as it went."""
    if record.done <= 0:
        return "unknown time"
    minutes, seconds = divmod(round(record.elapsed_s * (1 - record.done) / record.done), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def evaluation_text(record: EvaluationRecord) -> str:
    """What the evaluation found."""
    what = "data" if record.perplexity is None else "text"
    best = ", the best so far" if record.best else ""
    return f"held-out {what} after update {record.update:,}: {record.to_text()}{best}"
