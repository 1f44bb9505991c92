"""How much `halfstep check` finds, how often it is wrong, and how fast it is: `python -m benchmarks.check [--quick] [--json]`.

Faults: the cases beside the repository, scored by the tool that comes with them. Speed: lines per second over one large tree
(the installed `transformers`) on one core, TorchFix on a sample of the same files in the same run; and one small file from
start to finish, with the interpreter's start.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.harness import Goal, Row, main, seconds_of_process, skipped
from halfstep.cli.check import check_source
from halfstep.findings.registry import all_rules
from halfstep.imagine.source import files_under, read
from halfstep.measure.stats import summarize
from halfstep.rules.settings import Settings

ROOT = Path(__file__).parents[1]
SCORER = ROOT.parent / "shared" / "tools" / "score_cases.py"
SCORE = re.compile(
    r"recall \S+ \((?P<recall>\d+)%\), placed \S+ \((?P<placed>\d+)%\), "
    r"false alarms: (?P<faulty>\d+) on faulty scripts, (?P<clean>\d+) of"
)
SMALL = """import torch
from torch import nn


def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""
GOALS = {
    "recall": Goal(bound=97, at_most=False),
    "placed": Goal(bound=95, at_most=False),
    "faulty": Goal(bound=2),
    "clean": Goal(bound=0),
}


def cases(quick: bool) -> Iterator[Row]:
    """Recall, placement and false alarms on the given cases."""
    names = {"recall": "kinds found, %", "placed": "placed, %", "faulty": "alarms on faulty", "clean": "clean with alarm"}
    if not SCORER.exists():
        yield from (
            skipped(what, "given cases", "the cases are not beside this repository", GOALS[k]) for k, what in names.items()
        )
        return
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run([sys.executable, str(SCORER), "check"], capture_output=True, text=True, check=True, env=environment)
    found = SCORE.search(done.stdout)
    if found is None:
        raise RuntimeError(f"the scorer said {done.stdout!r}")
    for key, what in names.items():
        yield Row(what=what, against="given cases", figure=summarize([float(found[key])], ""), goal=GOALS[key])


def speed(quick: bool) -> Iterator[Row]:
    """Lines per second of one large tree, ours and TorchFix's."""
    goal = Goal(bound=25, at_most=False)
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        yield skipped("lines per second", "TorchFix", "transformers is not installed", goal)
        return
    tree = sorted(files_under(list(spec.submodule_search_locations), []))
    ours = tree[:: 10 if quick else 1]
    rates = [_rate(ours, _check) for _ in range(1 if quick else 3)]
    yield Row(
        what="lines per second", against="goal alone", figure=summarize(rates, "lines/s"), goal=Goal(bound=50_000, at_most=False)
    )
    if _torchfix_python() is None:
        yield skipped(
            "lines per second, ratio", "TorchFix", "torchfix is neither installed (extra `bench`) nor on the PATH", goal
        )
        return
    sample = tree[:: len(tree) // (20 if quick else 100)]
    theirs = [_rate(sample, _torchfix) for _ in range(1 if quick else 3)]
    ratios = [a / b for a, b in zip(rates, theirs, strict=True)]
    note = f"{summarize(rates, 'lines/s')} against {summarize(theirs, 'lines/s')} on {len(sample)} of {len(tree)} files"
    yield Row(what="lines per second, ratio", against="TorchFix", figure=summarize(ratios, ""), goal=goal, note=note)


def _rate(files: list[Path], work: Callable[[list[Path]], float | None]) -> float:
    lines = sum(path.read_bytes().count(b"\n") for path in files)
    started = time.process_time()
    seconds = work(files)
    return lines / (seconds if isinstance(seconds, float) else time.process_time() - started)


def _check(files: list[Path]) -> None:
    rules, settings = all_rules(), Settings()
    for path in files:
        source = read(path)
        if source is not None:
            check_source(source, rules, settings)


def _torchfix_python() -> str | None:
    """An interpreter that has TorchFix: this one, or that of the command on the PATH."""
    if importlib.util.find_spec("torchfix") is not None:
        return sys.executable
    command = shutil.which("torchfix")
    return str(Path(command).parent / "python") if command is not None else None


def _torchfix(files: list[Path]) -> float:
    """Processor seconds of a TorchFix process over these files; its start is not counted."""
    program = (
        "import sys, time; from torchfix.torchfix import TorchChecker; import ast, pathlib\n"
        "started = time.process_time()\n"
        "for name in sys.argv[1:]:\n"
        "    text = pathlib.Path(name).read_text()\n"
        "    list(TorchChecker(ast.parse(text), text.splitlines(True)).run())\n"
        "print(time.process_time() - started)"
    )
    done = subprocess.run(
        [_torchfix_python() or sys.executable, "-c", program, *map(str, files)], capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def small_file(quick: bool) -> Iterator[Row]:
    """One small file from the shell's point of view."""
    path = Path(__file__).with_name("_small_case.py")
    path.write_text(SMALL)
    try:
        seconds = [seconds_of_process(["-m", "halfstep", "check", str(path)]) for _ in range(3 if quick else 15)]
    finally:
        path.unlink()
    yield Row(what="one small file, start to finish", against="-", figure=summarize(seconds, "s"), goal=Goal(bound=0.3))


def slowest(quick: bool) -> Iterator[Row]:
    """The slowest file of everything that is installed, in processor seconds."""
    packages = Path(torch.__file__).parents[1]
    files = sorted(files_under([str(packages)], []))[:: 20 if quick else 1]
    rules, settings = all_rules(), Settings()
    worst, name = 0.0, Path("-")
    for path in files:
        started = time.process_time()
        source = read(path)
        if source is not None:
            check_source(source, rules, settings)
        took = time.process_time() - started
        if took > worst:
            worst, name = took, path
    note = f"{len(files)} files; slowest {name.relative_to(packages) if name.is_relative_to(packages) else name}"
    yield Row(what="slowest installed file", against="-", figure=summarize([worst], "s"), goal=Goal(bound=2), note=note)


if __name__ == "__main__":
    parts = {"cases": cases, "speed": speed, "small": small_file, "slowest": slowest}
    raise SystemExit(main(__doc__ or "", parts, torch.device("cpu")))
