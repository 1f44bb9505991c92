"""Training against the usual ways of doing it: `python -m benchmarks.train`.

Every row is measured here, both sides in turn in one run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.first_update import seconds_to_first_update
from benchmarks.harness import Goal, Row, main, output_of_process, ratio_row
from benchmarks.instructions import write, write_text
from benchmarks.loss_peak import KINDS
from benchmarks.trainers import AT_ONCE, EQUAL_LENGTH, Numbers, Trainers, samples_in
from halfstep._compat import accelerator_device
from halfstep.measure.stats import paired_ratio, summarize

Asked = tuple[str, dict[str, Any]]
"""A kind of trainer and its options."""
EQUAL_FP32 = {"equal": True, "precision": "fp32", "batch": {"global": AT_ONCE}}
EQUAL_BF16 = {**EQUAL_FP32, "precision": "bf16"}
FILLED_UP = {"batch": {"global": AT_ONCE}}
WITHOUT_GOAL = ("halfstep fp32", "by hand, equal", "by hand bf16, equal")
"""For comparison only: left out of a quick run."""


def large_vocabulary(quick: bool) -> Iterable[Row]:
    """A small LLaMA over a vocabulary of 32,000, 2,048 tokens a micro-batch: chunked against plain cross-entropy."""
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for _ in range(1 if quick else 5):
        with ThreadPoolExecutor(len(KINDS) if quick else 1) as pool:  # beside each other where no time is told
            for kind, found in zip(KINDS, pool.map(_highest, KINDS, ["2" if quick else "4"] * len(KINDS)), strict=True):
                runs[kind].append(found)
    peaks = {kind: [float(run["peak_bytes"]) for run in each] for kind, each in runs.items()}
    against = "plain cross-entropy"
    yield ratio_row("peak memory, vocabulary 32,000", against, peaks["chunked"], peaks["plain"], goal=Goal(bound=0.7), unit="B")
    if not quick:
        seconds = {kind: [median(run["seconds"]) for run in each] for kind, each in runs.items()}
        yield ratio_row("update, vocabulary 32,000", against, seconds["chunked"], seconds["plain"])


def _highest(kind: str, updates: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output_of_process(["-m", "benchmarks.loss_peak", kind, updates]))
    return found


def throughput(quick: bool) -> Iterator[Row]:
    """Tokens that count in a second, one pass over the same data a round."""
    documents, sequences = (16, AT_ONCE) if quick else (160, 4 * AT_ONCE)
    asked: dict[str, Asked] = {
        "halfstep": ("halfstep", FILLED_UP),
        "halfstep fp32": ("halfstep", {**FILLED_UP, "precision": "fp32"}),
        "HF Trainer": ("trainer", {}),
        "halfstep, equal": ("halfstep", EQUAL_FP32),
        "HF Trainer, equal": ("trainer", {"equal": True}),
        "HF Trainer bf16, equal": ("trainer", {"equal": True, "bf16": True}),
        "Accelerate bf16, equal": ("accelerate", {"equal": True, "bf16": True}),
        "by hand, equal": ("by hand", {"equal": True}),
        "halfstep bf16, equal": ("halfstep", EQUAL_BF16),
        "by hand bf16, equal": ("by hand", {"equal": True, "bf16": True}),
    }
    if quick:
        asked = {name: each for name, each in asked.items() if name not in WITHOUT_GOAL}
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), documents)
        write_text(Path(name), sequences, EQUAL_LENGTH)
        passes = _in_turn(asked, Path(name), rounds=0 if quick else 5)
    mixed = "instruction data of mixed lengths"
    yield _speed(mixed, passes, "halfstep", "HF Trainer", Goal(bound=1.8, at_most=False))
    if not quick:
        yield _speed(f"{mixed}, both fp32", passes, "halfstep fp32", "HF Trainer")
        yield _speed("equal lengths, both bf16", passes, "halfstep bf16, equal", "by hand bf16, equal")
        yield _speed("equal lengths, both fp32", passes, "halfstep, equal", "by hand, equal")
    five_percent = Goal(bound=1.05, at_most=False)
    for other in ("HF Trainer", "Accelerate"):
        yield _speed("equal lengths, both bf16", passes, "halfstep bf16, equal", f"{other} bf16, equal", five_percent)
    yield _speed("equal lengths, both fp32", passes, "halfstep, equal", "HF Trainer, equal", five_percent)
    yield _speed(
        "bf16 over fp32, equal lengths", passes, "halfstep bf16, equal", "halfstep, equal", Goal(bound=1.4, at_most=False)
    )
    waits = [100 * each["waited_s"] / each["seconds"] for each in passes["halfstep"]]
    yield Row(what="input wait, mixed lengths", against="update", figure=summarize(waits, "%"), goal=Goal(bound=1.0))


def _in_turn(asked: dict[str, Asked], folder: Path, *, rounds: int) -> dict[str, list[Numbers]]:
    """Passes of every side in each round, after one of each that is not counted, unless it is the only one.

    Accelerate, and HF Trainer through it, has one precision in a process.
    """
    passes: dict[str, list[Numbers]] = {name: [] for name in asked}
    with ExitStack() as stack:
        processes = {each: stack.enter_context(Trainers(each[0], folder)) for each in {*map(_process, asked.values())}}
        for _ in range(rounds + 1):
            for name, (kind, options) in asked.items():
                passes[name].append(processes[_process((kind, options))].one_pass(**options))
    return {name: each[1:] or each for name, each in passes.items()}


def _process(asked: Asked) -> tuple[str, bool]:
    """Which process a trainer lives in."""
    kind, options = asked
    return kind, kind in ("trainer", "accelerate") and bool(options.get("bf16", False))


def _speed(what: str, passes: dict[str, list[Numbers]], ours: str, theirs: str, goal: Goal | None = None) -> Row:
    """How many times as fast ours goes over the data that both go over; wall time, with CPU time in the note."""
    wall, cpu = ([[each[key] for each in passes[side]] for side in (ours, theirs)] for key in ("seconds", "cpu_s"))
    note = (
        f"a pass takes {summarize(wall[0], 's')} against {summarize(wall[1], 's')}; ratio of CPU time "
        f"{paired_ratio(cpu[1], cpu[0])}, of the least wall time {min(wall[1]) / min(wall[0]):.3g}"
    )
    return Row(what=what, against=theirs.partition(",")[0], figure=paired_ratio(wall[1], wall[0]), goal=goal, note=note)


def first_update(quick: bool) -> Iterator[Row]:
    """From the start of the process to the first update, small model, tokens kept from before."""
    from datasets import Dataset

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, 16 if quick else 160)
        Dataset.from_list(samples_in(folder, equal=False)).save_to_disk(name + "/tokens")
        words = [f"data.files={name}/rows.jsonl", f"data.tokenizer={name}", "evaluation.every_updates=0"]
        settings = [word for setting in words for word in ("--set", setting)]
        seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
        for index in range(1 if quick else 5):
            run = ["-m", "halfstep", "train", *settings, "--run", f"{name}/run{index}", "--set", "limits.epochs=1"]
            seconds["ours"].append(seconds_to_first_update(run))
            seconds["theirs"].append(seconds_to_first_update(["-m", "benchmarks.first_update", name]))
    yield ratio_row("start to first update", "HF Trainer", seconds["ours"], seconds["theirs"], goal=Goal(bound=0.8))


def same_loss(quick: bool) -> Iterator[Row]:
    """The last loss after the same updates in the same order."""
    with tempfile.TemporaryDirectory() as name:
        write_text(Path(name), (2 if quick else 20) * AT_ONCE, EQUAL_LENGTH)
        found = json.loads(output_of_process(["-m", "benchmarks.same_loss", name]))
    apart = 1e6 * abs(found["halfstep"] - found["by hand"]) / found["by hand"]
    note = f"{found['halfstep']:.7f} against {found['by hand']:.7f}, fp32, two micro-batches against one batch"
    figure = summarize([apart], "millionths")
    yield Row(what="last loss, difference", against="plain PyTorch loop", figure=figure, goal=Goal(bound=10.0), note=note)


BENCHMARKS = {
    "throughput": throughput,
    "vocabulary": large_vocabulary,
    "first-update": first_update,
    "same-loss": same_loss,
}

if __name__ == "__main__":
    sys.exit(main("Training against the usual ways of doing it.", BENCHMARKS, accelerator_device()))
