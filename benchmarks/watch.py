"""What `halfstep watch` finds and what it costs: `python -m benchmarks.watch [--quick] [--json]`.

Cost: the same loop with and without the recorder and its probes, in turn, in blocks, in one process; at the start of a run,
where everything is heard, and after it, where stretches are. `detect_anomaly` for comparison. Faults: the cases beside the
repository, each run under watch, scored by the tool that comes with them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.harness import Goal, Row, main, ratio_row, skipped
from benchmarks.models import Batch, cross_entropy, gpt, mean_square, tiny
from halfstep._compat import accelerator_device
from halfstep.measure.stats import summarize
from halfstep.record import tape
from halfstep.record.session import Session

DEVICE = accelerator_device()
ROOT = Path(__file__).parents[1]
SCORER = ROOT.parent / "shared" / "tools" / "score_cases.py"
SCORE = re.compile(
    r"recall \S+ \((?P<recall>\d+)%\), placed \S+ \((?P<placed>\d+)%\), "
    r"false alarms: (?P<faulty>\d+) on faulty scripts, (?P<clean>\d+) of"
)
Loss = Callable[[nn.Module, Batch], Tensor]
Update = Callable[[], None]


def loop(made: tuple[nn.Module, list[Batch]], loss: Loss) -> Update:
    """A window of micro-batches and a step, by hand."""
    model, batches = made
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def update() -> None:
        optimizer.zero_grad()
        for batch in batches:
            (loss(model, batch) / len(batches)).backward()
        optimizer.step()

    return update


def blocks(
    plain: Update, watched: Update, session: Session, *, rounds: int, each: int, warmup: int = 3
) -> tuple[list[float], list[float]]:
    """Seconds an update without and with the recorder, each round a block of both; the first of a block are warm-up."""
    without: list[float] = []
    heard: list[float] = []
    for _ in range(rounds):
        without += _timed(plain, each, warmup)
        session.start()
        heard += _timed(watched, each, warmup)
        session.patches.undo()
    return without, heard


def _timed(update: Update, each: int, warmup: int) -> list[float]:
    seconds = []
    for number in range(each + warmup):
        begun = time.perf_counter()
        update()
        if number >= warmup:
            seconds.append(time.perf_counter() - begun)
    return seconds


def tiny_model(quick: bool) -> Iterable[Row]:
    """A model so small that overhead is all there is."""
    torch.set_num_threads(1)
    session = Session()
    plain, watched = loop(tiny(DEVICE), mean_square), loop(tiny(DEVICE), mean_square)
    rounds = 3 if quick else 20
    without, heard = blocks(plain, watched, session, rounds=rounds, each=20)
    yield ratio_row("update of the tiny model, start of a run", "without", heard, without)
    session.start()
    while not session.recorder.tape.is_late:
        watched()
    session.patches.undo()
    without, heard = blocks(plain, watched, session, rounds=2 * rounds, each=20)
    yield ratio_row(f"update of the tiny model, after {tape.HEAD} events", "without", heard, without, goal=Goal(bound=1.5))
    yield _anomaly("update of the tiny model", plain, without, each=20, rounds=rounds)


def gpt_model(quick: bool) -> Iterable[Row]:
    """The GPT of 13 million parameters."""
    session = Session()
    plain, watched = loop(gpt(DEVICE), cross_entropy), loop(gpt(DEVICE), cross_entropy)
    repeats = {"rounds": 1, "each": 2, "warmup": 1} if quick else {"rounds": 8, "each": 5, "warmup": 2}
    without, heard = blocks(plain, watched, session, **repeats)
    yield ratio_row("update of the 13 M GPT, start of a run", "without", heard, without, goal=Goal(bound=1.05))
    yield _anomaly("update of the 13 M GPT", plain, without, each=1 if quick else 5, rounds=1)


def _anomaly(what: str, update: Update, without: list[float], *, each: int, rounds: int) -> Row:
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        seconds = [s for _ in range(rounds) for s in _timed(update, each, 1)]
    seconds = (seconds * (len(without) // len(seconds) + 1))[: len(without)]
    return ratio_row(f"{what}, detect_anomaly", "without", seconds, without)


def cases(quick: bool) -> Iterator[Row]:
    """Recall, placement and false alarms on the given cases, each run under watch."""
    goals = {"recall": Goal(bound=92, at_most=False), "placed": None, "faulty": None, "clean": Goal(bound=0)}
    names = {"recall": "kinds found, %", "placed": "placed, %", "faulty": "alarms on faulty", "clean": "clean with alarm"}
    cause = "the cases are not beside this repository" if not SCORER.exists() else "takes minutes: run it without --quick"
    if quick or not SCORER.exists():
        yield from (skipped(what, "given cases", cause, goals[key]) for key, what in names.items())
        return
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(SCORER), "watch"], capture_output=True, text=True, check=True, env=environment)
    found = SCORE.search(done.stdout)
    if found is None:
        raise RuntimeError(f"the scorer said {done.stdout!r}")
    for key, what in names.items():
        yield Row(what=what, against="given cases", figure=summarize([float(found[key])], ""), goal=goals[key])


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", {"tiny": tiny_model, "gpt": gpt_model, "cases": cases}, DEVICE))
