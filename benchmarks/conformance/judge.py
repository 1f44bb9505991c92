"""What a cell of the table says: right, wrong with the figure, refuses, not offered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks.conformance.job import Job, NotOffered, Outcome, started_from

Kind = Literal["right", "wrong", "refuses", "not offered"]
Check = Callable[[Job, Sequence[Outcome], Sequence[Outcome]], "str | None"]
"""Of a job, what each rank gave and what it had to give: the figure that is wrong, or None. May raise `NotOffered`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """How a stack did in a scenario, and the figure or the sentence behind it."""

    kind: Kind
    figure: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.figure}" if self.figure else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a stack answered to a job: an outcome of each rank, or why there is none."""

    outcomes: tuple[Outcome, ...] = ()
    refused: str = ""
    not_offered: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Answer:
        """What `to_json` wrote."""
        return cls(**{**told, "outcomes": tuple(Outcome(**each) for each in told["outcomes"])})


def judged(check: Check, job: Job, answer: Answer, against: Answer) -> Cell:
    """The cell of an answer."""
    for each in (answer, against):
        if each.not_offered:
            return Cell(kind="not offered", figure=each.not_offered)
        if each.refused:
            return Cell(kind="refuses", figure=each.refused)
    try:
        wrong = check(job, answer.outcomes, against.outcomes)
    except NotOffered as why:
        return Cell(kind="not offered", figure=str(why))
    return Cell(kind="right") if wrong is None else Cell(kind="wrong", figure=wrong)


def parameters(tolerance: float = 1e-4) -> Check:
    """The parameters of each rank: how far they are from the right ones, measured by how far those have moved."""

    def check(job: Job, found: Sequence[Outcome], right: Sequence[Outcome]) -> str | None:
        start = started_from(job)
        for outcome, must in zip(found, right, strict=True):
            if not all(map(math.isfinite, outcome.parameters)):
                return "weights are NaN or infinite"
            way = math.dist(must.parameters, start)
            apart = math.dist(outcome.parameters, must.parameters)
            if apart > tolerance * way + 1e-9:
                return f"weights {100 * apart / way:.3g}% of the way off" if way else f"weights moved by {apart:.2g}"
        return None

    return check


def alike(job: Job, found: Sequence[Outcome], right: Sequence[Outcome]) -> str | None:
    """The parameters bit by bit."""
    apart = max(math.dist(outcome.parameters, must.parameters) for outcome, must in zip(found, right, strict=True))
    return None if apart == 0 else f"weights {apart:.2g} away from the uninterrupted run's"


def numbers(name: str, missing: str, tolerance: float = 1e-4) -> Check:
    """A number for each update, or one number, on each rank that tells it."""

    def check(job: Job, found: Sequence[Outcome], right: Sequence[Outcome]) -> str | None:
        told = [
            (_listed(getattr(outcome, name)), _listed(getattr(must, name))) for outcome, must in zip(found, right, strict=True)
        ]
        if told[0][0] is None:
            raise NotOffered(missing)
        for ours, theirs in told:
            if wrong := ours is not None and _differ(ours, theirs or [], tolerance):
                return wrong
        return None

    return check


def _listed(value: Any) -> list[float] | None:
    return value if isinstance(value, list) or value is None else [value]


def _differ(found: list[float], right: list[float], tolerance: float) -> str | None:
    for number, (ours, theirs) in enumerate(zip(found, right, strict=False)):
        if not math.isclose(ours, theirs, rel_tol=tolerance) and not (math.isnan(ours) and math.isnan(theirs)):
            where = f" at number {number + 1}" if len(right) > 1 else ""
            return f"{ours:.4g} for {theirs:.4g}{where}"
    return f"{len(found)} figures for {len(right)}" if len(found) != len(right) else None


def moved_finite(job: Job, found: Sequence[Outcome], right: Sequence[Outcome]) -> str | None:
    """Weights are finite, whatever else became of the run."""
    broken = [sum(not math.isfinite(value) for value in outcome.parameters) for outcome in found]
    return f"{broken[0]} of {len(found[0].parameters)} weights are NaN or infinite" if any(broken) else None


def nan_shown(job: Job, found: Sequence[Outcome], right: Sequence[Outcome]) -> str | None:
    """A loss that is NaN is reported as NaN."""
    losses = found[0].losses or []
    poisoned = next(number for number, item in enumerate(job.items) if item.poison == "data") // job.accumulate
    return None if math.isnan(losses[poisoned]) else f"{losses[poisoned]:.4g} for NaN at update {poisoned + 1}"


def trains(job: Job, found: Sequence[Outcome], right: Sequence[Outcome]) -> str | None:
    """The micro-batch that was found trains on every sample."""
    seen = len(set(found[0].ids))
    return found[0].stopped or (None if seen == len(job.items) else f"{seen} of {len(job.items)} samples were seen")


def dtypes(name: str, must: str) -> Check:
    """A number format."""

    def check(job: Job, found: Sequence[Outcome], right: Sequence[Outcome]) -> str | None:
        told = getattr(found[0], name)
        return None if told == must else f"{told} for {must}"

    return check


def each_once(job: Job, found: Sequence[Outcome], right: Sequence[Outcome]) -> str | None:
    """In each epoch each micro-batch is seen once, on some rank."""
    epochs = _epochs(job, found)
    counts = [sorted(epoch) for epoch in epochs]
    whole = list(range(len(job.items)))
    wrong = next((counted for counted in counts if counted != whole), None)
    return None if wrong is None else f"saw micro-batches {wrong} for {whole}"


def other_orders(job: Job, found: Sequence[Outcome], right: Sequence[Outcome]) -> str | None:
    """Each epoch has another order, and sees each micro-batch once."""
    epochs = _epochs(job, found)
    same = all(epoch == epochs[0] for epoch in epochs[1:])
    return f"the order {epochs[0]} in every epoch" if same else each_once(job, found, right)


def same_order(job: Job, found: Sequence[Outcome], right: Sequence[Outcome]) -> str | None:
    """The order of the uninterrupted run."""
    ours, theirs = found[0].ids, right[0].ids
    if ours == theirs:
        return None
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return f"from place {first + 1} on {ours[first : first + 6]} for {theirs[first : first + 6]}"


def reduced_once(job: Job, found: Sequence[Outcome], right: Sequence[Outcome]) -> str | None:
    """Gradients are reduced once a window."""
    windows = job.updates_per_epoch * job.epochs
    counted = found[0].gradient_reductions
    return None if counted == windows else f"{counted} reductions of gradients in {windows} windows of {job.accumulate}"


def _epochs(job: Job, found: Sequence[Outcome]) -> list[list[int]]:
    """Micro-batches of each epoch, of all ranks."""
    whole: list[list[int]] = [[] for _ in range(job.epochs)]
    for outcome in found:
        size = math.ceil(len(outcome.ids) / job.epochs)
        for epoch in range(job.epochs):
            whole[epoch] += outcome.ids[epoch * size : (epoch + 1) * size]
    return whole
