"""The table: rows measured in turn, each trial in a process of its own, compared round by round."""

from __future__ import annotations

import json
import math
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from halfstep.bench.describing import Subject
from halfstep.bench.row import Row, Trial
from halfstep.bench.trying import Task
from halfstep.config.options import Precision
from halfstep.errors import ConfigError
from halfstep.measure.stats import Measured, paired_ratio, summarize
from halfstep.train.launch import python_command

ROUNDS = 3
UPDATES = 6
LIMIT_S = 60.0
START_S = 180.0
"""Seconds that a process may take beyond the limit to start, to open the data and to end an update that it began."""
COMPARED = 3
"""First updates whose losses are compared with FP32's: later ones drift apart, as any two roundings do."""

EXPLAINED = 6
"""Updates of a profile after the first two: a warm one, three under the profiler, one under a mode, one to spare."""
SLOWER, NO_DIFFERENCE = NOT_FASTER = ("slower", "no difference beyond the spread")

QUESTION = "question.json"
KILLED = "Signal 9 (SIGKILL)"
"""What torchrun says of a rank that the system ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was measured of a row.

    Attributes:
        row: which.
        rate: what counted, a second, over rounds; None where it failed.
        against: the rate over that of the first row, round by round; None for the first row itself, or where either failed.
        every_round: 1 where it was faster than the first row in every round, -1 where it was slower in every round, else 0.
        loss_deviation: the largest relative distance of the first losses from the first row's.
        allocated_bytes: the highest of all rounds. reserved_bytes: likewise, where there is an allocator.
        update_s: the fastest update.
        failed: why there is nothing else.
    """

    row: Row
    rate: Measured | None = None
    against: Measured | None = None
    every_round: int = 0
    loss_deviation: float | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    update_s: float | None = None
    failed: str | None = None

    @property
    def verdict(self) -> str:
        """Whether it is faster than the first row, in words that do not call noise a gain."""
        if self.against is None:
            return ""
        if self.against.count < ROUNDS:
            return "too few rounds to tell"
        return {1: "faster", -1: SLOWER, 0: NO_DIFFERENCE}[self.every_round]


def bench(
    rows: Sequence[Row],
    *,
    config: str | None,
    settings: Sequence[str],
    rounds: int = ROUNDS,
    updates: int = UPDATES,
    limit_s: float = LIMIT_S,
    told: Callable[[str], None] = lambda sentence: None,
) -> list[Result]:
    """Measure the rows, in turn, so that what slows the machine slows all of them.

    Args:
        rows: the first is what the others are compared with.
        config: file of a `train` configuration; None for the default.
        settings: keys that are set over it.
        rounds: trials of each row.
        updates: updates that are timed in a trial.
        limit_s: seconds after which a trial begins no further update.
        told: hears what is being done.

    Raises:
        ConfigError: the configuration cannot be run at all.
    """
    trials = measure(rows, config=config, settings=settings, rounds=rounds, updates=updates, limit_s=limit_s, told=told)
    return compare(trials, rows[0])


def measure(
    rows: Sequence[Row],
    *,
    config: str | None,
    settings: Sequence[str],
    rounds: int,
    updates: int,
    limit_s: float,
    told: Callable[[str], None],
) -> dict[Row, list[Trial]]:
    """The trials of each row, one a round until one fails; arguments and errors are those of `bench`."""
    trials: dict[Row, list[Trial]] = {row: [] for row in rows}
    for number in range(1, rounds + 1):
        for row in rows:
            if any(trial.failed for trial in trials[row]):
                continue
            told(f"round {number} of {rounds}: {row}")
            task = Task(config=config, settings=[*settings, *row.settings()], updates=updates, limit_s=limit_s)
            trials[row].append(in_processes(task, row.processes))
    return trials


def compare(trials: Mapping[Row, Sequence[Trial]], first: Row) -> list[Result]:
    """What the trials of each row say, against those of the first in the same rounds."""
    return [_result(row, mine, trials[first]) for row, mine in trials.items()]


def explained(
    results: Sequence[Result], *, config: str | None, settings: Sequence[str], limit_s: float, told: Callable[[str], None]
) -> dict[str, tuple[str, ...]]:
    """Where the time goes of the first row of each low precision that is not faster than the first of all, by its name."""
    slow = [result.row for result in results if result.verdict in NOT_FASTER and result.row.precision is not Precision.FP32]
    found = {}
    for row in {row.precision: row for row in reversed(slow)}.values():
        told(f"why it is not faster: {row}")
        task = Task(config=config, settings=[*settings, *row.settings()], updates=EXPLAINED, limit_s=limit_s, explain=True)
        trial = in_processes(task, row.processes)
        found[str(row)] = (trial.failed,) if trial.failed else trial.why
    return found


def subject_of(config: str | None, settings: Sequence[str]) -> Subject:
    """What is measured, found out in a process of its own, so that this one holds no memory of the device.

    Raises:
        ConfigError: the configuration cannot be run.
    """
    return Subject(**_answer({"config": config, "settings": list(settings)}, START_S))


def in_processes(task: Task, ranks: int) -> Trial:
    """One trial, in as many processes of its own as there are ranks.

    Raises:
        ConfigError: the configuration cannot be run.
    """
    try:
        answer = _answer(asdict(task), task.limit_s + START_S, ranks)
    except subprocess.TimeoutExpired:
        return Trial(failed=f"not measured: no update ended within {task.limit_s + START_S:.0f} s")
    found: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in answer.items()}
    return Trial(**found)


def _answer(question: dict[str, Any], limit_s: float, ranks: int = 1) -> dict[str, Any]:
    with TemporaryDirectory(prefix="halfstep-bench-") as folder:
        place = Path(folder)
        (place / QUESTION).write_text(json.dumps(question), encoding="utf-8")
        command, environment = python_command(["halfstep.bench", folder], processes=ranks)
        code, complaint = _ended(command, environment, limit_s)
        answers = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(place.glob("answer-*.json"))]
    told = [answer for answer in answers if answer.get("failed")] or [answer for answer in answers if "refused" in answer]
    if not told and (code == -signal.SIGKILL or KILLED in complaint):
        return Trial(failed="does not fit: the system ended the process, as it does when memory runs out").to_dict()
    if not told and len(answers) < ranks:
        words = (complaint.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(f"A trial failed: {words}")
    answer: dict[str, Any] = (told or answers)[0]
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    return answer


def _ended(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> tuple[int, str]:
    """Exit code and stderr. A process that is late is asked to end, so that torchrun ends its ranks."""
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, complaint = process.communicate(timeout=limit_s)
        finally:
            if process.poll() is None:
                process.terminate()
                process.communicate()
    return process.returncode, complaint


def _result(row: Row, trials: Sequence[Trial], first: Sequence[Trial]) -> Result:
    failed = next((trial.failed for trial in trials if trial.failed), None)
    if failed is not None:
        return Result(row=row, failed=failed)
    rates = [trial.rate for trial in trials]
    compared = trials is not first and not any(trial.failed for trial in first)
    theirs = [trial.rate for trial in first] if compared else []
    faster, slower = (all(sign * (mine - other) > 0 for mine, other in zip(rates, theirs, strict=False)) for sign in (1, -1))
    return Result(
        row=row,
        rate=summarize(rates, ""),
        against=paired_ratio(rates, theirs) if compared else None,
        every_round=faster - slower,
        loss_deviation=_deviation(trials[0], first[0]) if compared else None,
        allocated_bytes=_most([trial.allocated_bytes for trial in trials]),
        reserved_bytes=_most([trial.reserved_bytes for trial in trials]),
        update_s=min(min(trial.seconds) for trial in trials),
    )


def _deviation(trial: Trial, exact: Trial) -> float:
    pairs = list(zip(trial.losses[:COMPARED], exact.losses[:COMPARED], strict=False))
    apart = [abs(ours - theirs) / abs(theirs) for ours, theirs in pairs]
    return math.nan if any(math.isnan(each) for each in apart) else max(apart)


def _most(found: Sequence[int | None]) -> int | None:
    known = [each for each in found if each is not None]
    return max(known) if known else None
