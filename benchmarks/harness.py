"""What every benchmark shares: rows with a goal, the machine they were measured on, and a table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata

import torch

from halfstep.measure.clock import Work, interleaved_s
from halfstep.measure.hardware import describe
from halfstep.measure.stats import Measured, paired_ratio, summarize

PEERS = ("torch", "accelerate", "lightning", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A bound that a figure should keep, to the two decimals that it is written with."""

    bound: float
    at_most: bool = True

    def holds(self, figure: Measured) -> bool:
        value = round(figure.value, 2)
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{'at most' if self.at_most else 'at least'} {self.bound:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured figure.

    Attributes:
        what: what was measured.
        against: what it was measured against.
        figure: the median with its spread; None where it could not be measured.
        goal: what the figure should keep; None where it is told for comparison only.
        note: the sizes behind a ratio, or why there is no figure.
    """

    what: str
    against: str
    figure: Measured | None
    goal: Goal | None = None
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the goal holds; None where there is no goal or no figure."""
        return None if self.figure is None or self.goal is None else self.goal.holds(self.figure)


Benchmark = Callable[[bool], Iterable[Row]]
"""Takes whether to be quick, and yields rows as they are measured."""


def paired(
    works: Mapping[str, Work], device: torch.device, *, rounds: int, warmup_rounds: int = 2, before: Work | None = None
) -> dict[str, list[float]]:
    """Seconds of each work in each round, in turn; see `halfstep.measure.clock.interleaved_s`."""
    return interleaved_s(works, device, rounds=rounds, warmup_rounds=warmup_rounds, before=before)


def ratio_row(
    what: str, against: str, ours: list[float], theirs: list[float], *, goal: Goal | None = None, unit: str = "s"
) -> Row:
    """The ratio of two things measured in the same rounds, with both sizes in the note.

    On a busy machine the least of each says more than its median.
    """
    least = paired_ratio([min(ours)], [min(theirs)])
    note = f"{summarize(ours, unit)} against {summarize(theirs, unit)}; ratio of the least of each {least.value:.3g}"
    return Row(what=what, against=against, figure=paired_ratio(ours, theirs), goal=goal, note=note)


def skipped(what: str, against: str, cause: str, goal: Goal | None = None) -> Row:
    """A row that could not be measured here, and why."""
    return Row(what=what, against=against, figure=None, goal=goal, note=f"skipped: {cause}")


def seconds_of_process(arguments: list[str]) -> float:
    """Seconds that a Python process takes from start to end."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - started


def output_of_process(arguments: list[str]) -> str:
    """What a Python process writes to stdout."""
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout


def main(
    description: str, benchmarks: Mapping[str, Benchmark], device: torch.device, also: Mapping[str, str] | None = None
) -> int:
    """Run the benchmarks that were asked for and print their rows; the exit code is 0 whatever the figures are.

    Args:
        description: of the whole, for `--help`.
        benchmarks: by name.
        device: what they run on, for the heading.
        also: options with a value that the benchmarks themselves look at, with their help.
    """
    args = _arguments(description, benchmarks, also or {})
    rows: list[Row] = []
    for name in args.only or benchmarks:
        print(f"{name} ...", file=sys.stderr)
        rows += benchmarks[name](args.quick)
    print(_json(rows, device) if args.json else _text(rows, device))
    return 0


def _arguments(description: str, benchmarks: Mapping[str, Benchmark], also: Mapping[str, str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    for option, said in also.items():
        parser.add_argument(option, metavar="VALUE", help=said)
    parser.add_argument("--quick", action="store_true", help="few repeats: shows that it runs, not what it reaches")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", nargs="+", choices=tuple(benchmarks), metavar="NAME", help=", ".join(benchmarks))
    return parser.parse_args()


def _machine(device: torch.device) -> dict[str, str]:
    told = describe(device)
    memory = "unknown memory" if told.memory_bytes is None else f"{told.memory_bytes / 2**30:.1f} GiB"
    versions = {name: version_of(name) for name in ("halfstep", *PEERS)}
    return {
        "device": f"{told.name} ({told.backend}), {told.cores} cores, {torch.get_num_threads()} threads, {memory}",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "date": time.strftime("%Y-%m-%d"),
        "load": f"{_load()} (processes that want a core, mean of the last minute; this benchmark is among them)",
    }


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def version_of(package: str) -> str:
    """The installed version of a package, or that there is none."""
    if package == "halfstep":
        from halfstep import __version__

        return __version__
    if package == "torch":
        return str(torch.__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _json(rows: list[Row], device: torch.device) -> str:
    listed = [{**asdict(row), "goal": row.goal and str(row.goal), "holds": row.holds} for row in rows]
    return json.dumps({"machine": _machine(device), "rows": listed}, indent=2)


def _text(rows: list[Row], device: torch.device) -> str:
    head = [f"{name:<9}{told}" for name, told in _machine(device).items()]
    table = [("what", "against", "figure (middle half, runs)", "goal", "holds"), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    notes = [f"  {row.what} against {row.against}: {row.note}" for row in rows if row.note]
    return "\n".join([*head, "", lines[0], "-" * len(lines[0]), *lines[1:], "", "behind the figures:", *notes])


def _cells(row: Row) -> tuple[str, ...]:
    figure = "not measured" if row.figure is None else str(row.figure)
    holds = {True: "yes", False: "no", None: "-"}[row.holds]
    return (row.what, row.against, figure, "-" if row.goal is None else str(row.goal), holds)
