"""The range test of learning rates: a run whose rate rises evenly on a logarithmic scale says where a loss still falls.

Smith (2017, arXiv 1506.01186, section 3.3). It says what can be tried, not what is best: nothing is taken from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from halfstep.bench.row import Row, Trial
from halfstep.measure.stats import summarize

RISE = 30.0
"""From a thirtieth of the configured rate to thirty times it."""
RUNS = 3
SMOOTH = 5
"""Losses that are averaged around each: single ones jump."""

RunOnce = Callable[[Sequence[str], float], Trial]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """What one rising run showed.

    Attributes:
        steepest: the rate at which the loss fell fastest; `None` where it never fell.
        lowest: the rate at which it was lowest.
        above: the first rate after that at which it was above where it began, or no number; `None` where that never was.
    """

    steepest: float | None
    lowest: float
    above: float | None


def range_test(
    row: Row, learning_rate: float, *, updates: int, runs: int, run: RunOnce, told: Callable[[str], None]
) -> list[Range]:
    """Rising runs of the row, one a seed.

    Args:
        row: how updates are made.
        learning_rate: the configured one.
        updates: of each run.
        runs: how many.
        run: one run with these settings whose rate rises so much to either side.
        told: hears what is being done.
    """
    found = []
    for seed in range(runs):
        told(f"range test {seed + 1} of {runs}: learning rate from {learning_rate / RISE:g} to {learning_rate * RISE:g}")
        steady = ["scheduler.name=constant", "scheduler.warmup_updates=0"]
        asked = [f"optimizer.learning_rate={learning_rate!r}", f"run.seed={seed}"]
        found.append(read(run([*row.settings(), *steady, *asked], RISE).losses, learning_rate, updates))
    return found


def read(losses: Sequence[float], learning_rate: float, updates: int) -> Range:
    """What the losses of a rising run say; fewer than `updates` where it could not go on."""
    rates = [learning_rate * RISE ** (2 * number / (updates - 1) - 1) for number in range(updates)]
    good = next((number for number, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    smooth = [fmean(losses[max(0, at - SMOOTH // 2) : min(good, at + SMOOTH // 2 + 1)]) for at in range(good)]
    if not smooth:
        return Range(steepest=None, lowest=rates[0], above=rates[0])
    lowest = min(range(good), key=smooth.__getitem__)
    falls = {at: smooth[at + 1] - smooth[at - 1] for at in range(1, min(good - 1, lowest + 1))}
    steepest = min(falls, key=falls.__getitem__, default=None)
    above = next((at for at in range(lowest, good) if smooth[at] > smooth[0]), good if good < updates else None)
    return Range(
        steepest=None if steepest is None or falls[steepest] >= 0 else rates[steepest],
        lowest=rates[lowest],
        above=None if above is None else rates[above],
    )


def conclusion(found: Sequence[Range], learning_rate: float) -> str:
    """What the runs say together, in a sentence."""
    steepest = [each.steepest for each in found if each.steepest is not None]
    above = [each.above for each in found if each.above is not None]
    fastest = f"falls fastest at {_rates(steepest)}" if steepest else "never falls"
    parts = [f"{fastest}, is lowest at {_rates([each.lowest for each in found])}"]
    if steepest:
        parts.append(f"the configured {learning_rate:g} is {learning_rate / summarize(steepest, '').value:.2g} times the former")
    if above:
        parts.append(f"is above where it began from {_rates(above)} on, in {len(above)} of {len(found)} runs")
        if learning_rate >= min(above):
            parts.append("the configured one is not below that: choose a lower one")
    else:
        parts.append(f"never rose above where it began, up to {learning_rate * RISE:g}")
    return f"Range test: while the rate rises, the loss {'; '.join(parts)}."


def _rates(rates: Sequence[float]) -> str:
    told = summarize(rates, "")
    return f"{told.value:.2g}" if len(rates) == 1 else f"{told.value:.2g} ({min(rates):.2g} to {max(rates):.2g})"
