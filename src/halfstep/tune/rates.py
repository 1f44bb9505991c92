"""The learning rate: short runs of some multiples of the configured one, each with the same seeds, compared seed by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from halfstep.bench.row import Row, Trial
from halfstep.config.choice import Choice
from halfstep.measure.stats import Measured, summarize

MULTIPLES = (1.0, 1.25, 1.5)
FEWEST_SEEDS = 3
LAST_SHARE = 0.2
"""Of a short run's losses, those that are averaged."""

RunOnce = Callable[[Sequence[str]], Trial]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What short runs with one learning rate came to.

    Attributes:
        multiple: of the configured rate.
        rate: the learning rate.
        losses: at the end of each run, one a seed; not finite where the run was stopped.
    """

    multiple: float
    rate: float
    losses: tuple[float, ...]

    @property
    def diverged(self) -> bool:
        """Whether any of the runs did not end with a number."""
        return not all(map(math.isfinite, self.losses))

    def apart(self, first: Swept) -> Measured | None:
        """The loss above that of the first, seed by seed; None where one of them is no number."""
        if self is first or self.diverged or first.diverged:
            return None
        return summarize([ours - theirs for ours, theirs in zip(self.losses, first.losses, strict=True)], "")

    def verdict(self, first: Swept) -> str:
        """Whether its loss is another than that of the first, which only all seeds together can tell."""
        if self.diverged:
            return "diverged"
        if self is first or first.diverged:
            return ""
        if len(self.losses) < FEWEST_SEEDS:
            return "too few seeds to tell"
        apart = [ours - theirs for ours, theirs in zip(self.losses, first.losses, strict=True)]
        if max(apart) < 0:
            return "lower with every seed"
        return "higher with every seed" if min(apart) > 0 else "no difference beyond the seeds"


def sweep(row: Row, learning_rate: float, *, seeds: int, run: RunOnce, told: Callable[[str], None]) -> list[Swept]:
    """Short runs of the row with each multiple of the rate, seed after seed; the configured rate comes first.

    Args:
        row: how updates are made.
        learning_rate: the configured one.
        seeds: how many runs of each.
        run: one short run with these settings.
        told: hears what is being done.
    """
    rates = [multiple * learning_rate for multiple in MULTIPLES]
    losses: dict[float, list[float]] = {rate: [] for rate in rates}
    for seed in range(seeds):
        for rate in rates:
            told(f"seed {seed + 1} of {seeds}: learning rate {rate:g}")
            losses[rate].append(last_loss(run([*row.settings(), f"optimizer.learning_rate={rate!r}", f"run.seed={seed}"])))
    return [Swept(multiple=m, rate=rate, losses=tuple(losses[rate])) for m, rate in zip(MULTIPLES, rates, strict=True)]


def last_loss(trial: Trial) -> float:
    """The mean of the last losses; NaN where the run was stopped."""
    if trial.failed is not None:
        return math.nan
    return fmean(trial.losses[-max(1, round(LAST_SHARE * len(trial.losses))) :])


def choose(swept: Sequence[Swept]) -> Choice[float]:
    """The rate to take: another than the configured one only where every seed says so."""
    first, seeds = swept[0], len(swept[0].losses)
    better = [each for each in swept if each.verdict(first) == "lower with every seed"]
    if better:
        best = min(better, key=lambda each: summarize(each.losses, "").value)
        less = f"{best.apart(first)} of loss, lower with each of {seeds} seeds"
        reason = f"{best.multiple:g} times the configured {first.rate:g}: {less}"
        return Choice(value=best.rate, reason=reason)
    said = "; ".join(f"{each.rate:g}: {each.verdict(first)}" for each in swept[1:])
    return Choice(value=first.rate, reason=f"the configured one stays after short runs with {seeds} seeds; {said}")


def lines_of(swept: Sequence[Swept]) -> list[tuple[str, ...]]:
    """A table of the short runs."""
    first = swept[0]
    head = ("learning rate", "loss at the end", "from the first, by seed", "says")
    return [head, *((f"{each.rate:g}", _loss(each), str(each.apart(first) or ""), each.verdict(first)) for each in swept)]


def _loss(swept: Swept) -> str:
    return "not finite" if swept.diverged else str(summarize(swept.losses, ""))
