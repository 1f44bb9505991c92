"""Repeated measurements: the median, how far they spread, and how to write both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

QUARTILES_NEED = 4
"""Below this number of measurements the quartiles say nothing, and the spread is from least to most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The median of repeated measurements of one thing.

    Attributes:
        value: the median.
        low: the first quartile, or the least of fewer than four measurements.
        high: the third quartile, or the greatest of fewer than four measurements.
        count: how many measurements were taken.
        unit: "s", "TFLOP/s", "B", or "" for a ratio.
    """

    value: float
    low: float
    high: float
    count: int
    unit: str

    @property
    def spread(self) -> float:
        """The width of the interval from `low` to `high`, in `unit`."""
        return self.high - self.low

    def __str__(self) -> str:
        factor, unit = _readable(abs(self.value), self.unit)
        style = _style(self.value * factor)
        value, low, high = (format(number * factor, style) for number in (self.value, self.low, self.high))
        unit = f" {unit}" if unit else ""
        return f"{value}{unit} once" if self.count == 1 else f"{value}{unit} ({low} to {high}, {self.count} runs)"


def summarize(samples: Sequence[float], unit: str) -> Measured:
    """The median and the spread of `samples`, which must not be empty.

    The spread is the middle half of the samples, because one interrupted run says nothing about the others.
    """
    ordered = sorted(samples)
    wide = len(ordered) < QUARTILES_NEED
    return Measured(
        value=median(ordered),
        low=ordered[0] if wide else _quantile(ordered, 0.25),
        high=ordered[-1] if wide else _quantile(ordered, 0.75),
        count=len(ordered),
        unit=unit,
    )


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Measured:
    """The ratio of two things measured in turn, round by round.

    Pairing takes out what slows both: a ratio of two medians does not.

    Args:
        ours: one measurement a round.
        theirs: the other measurement of the same rounds.
    """
    return summarize([mine / other for mine, other in zip(ours, theirs, strict=True)], "")


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics (type 7 of Hyndman and Fan, 1996)."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def _readable(size: float, unit: str) -> tuple[float, str]:
    if unit == "s" and 0 < size < 1e-3:
        return 1e6, "us"
    if unit == "s" and 0 < size < 1:
        return 1e3, "ms"
    if unit == "B":
        return 1 / 2**20, "MiB"
    return 1, unit


def _style(value: float) -> str:
    """A format with three significant digits; exponents only where nobody reads decimals any more."""
    size = abs(value)
    if 0 < size < 1e-4:
        return ".2e"
    decimals = 2
    while 0 < size < 1:
        size, decimals = size * 10, decimals + 1
    return f".{decimals if abs(value) < 10 else (1 if abs(value) < 100 else 0)}f"
