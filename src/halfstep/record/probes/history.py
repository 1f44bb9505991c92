"""Numbers over a run of any length, in a bounded number of points."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from halfstep.report.parts import ZERO, Heat, Series

MOST_POINTS = 1024
MOST_COLUMNS = 48


class History:
    """A number an update: every one at first, then every second, fourth, ...; those that are not finite are never thinned out.

    Args:
        limit: how many finite points are kept, and how many others; what comes after so many others is only counted.
    """

    def __init__(self, limit: int = MOST_POINTS) -> None:
        self._limit, self._stride, self._seen = limit, 1, 0
        self._finite: list[tuple[int, float]] = []
        self._others: list[tuple[int, float]] = []
        self.num_not_finite = 0
        self.last: float | None = None

    def add(self, update: int, value: float) -> None:
        """Keep the value of one update."""
        self.last = value
        if not math.isfinite(value):
            self.num_not_finite += 1
            if len(self._others) < self._limit:
                self._others.append((update, value))
            return
        if self._seen % self._stride == 0:
            self._finite.append((update, value))
        self._seen += 1
        if len(self._finite) > self._limit:
            self._finite, self._stride = self._finite[::2], self._stride * 2

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return iter(sorted(self._finite + self._others, key=lambda point: point[0]))

    def __len__(self) -> int:
        return len(self._finite) + len(self._others)

    def before(self, update: int) -> list[float]:
        """The finite values kept of earlier updates, in order."""
        return [value for index, value in self._finite if index < update]

    def series(self, name: str) -> Series:
        """As a line of a report."""
        return Series(name=name, points=tuple((float(update), value) for update, value in self))


class Grid:
    """One number a layer and update, in at most a few dozen columns: every update at first, then every second, fourth, ..."""

    def __init__(self, names: Sequence[str], limit: int = MOST_COLUMNS) -> None:
        self._names, self._limit, self._stride, self._seen = tuple(names), limit, 1, 0
        self._columns: list[tuple[int, tuple[float | None, ...]]] = []

    def add(self, update: int, values: Sequence[float | None]) -> None:
        """Keep the values of one update, one a layer."""
        if self._seen % self._stride == 0:
            self._columns.append((update, tuple(values)))
        self._seen += 1
        if len(self._columns) > self._limit:
            self._columns, self._stride = self._columns[::2], self._stride * 2

    def heat(self, *, title: str, about: str, low: float = 0.0, high: float = 1.0, unit: str = "") -> Heat:
        """As a heat map: layers down, updates across."""
        columns = [values for _, values in self._columns]
        rows = tuple(zip(*columns, strict=True)) if columns else tuple(() for _ in self._names)
        updates = tuple(str(update) for update, _ in self._columns)
        return Heat(title=title, about=about, rows=self._names, columns=updates, values=rows, low=low, high=high, unit=unit)

    def log_heat(self, *, title: str, about: str) -> Heat:
        """The same in powers of ten; what is not finite stays so. The smallest is faint, and only zero has no colour."""
        powers = Grid(self._names, self._limit)
        powers._columns = [(update, tuple(_power(v) for v in values)) for update, values in self._columns]
        finite = [v for _, values in powers._columns for v in values if v is not None and math.isfinite(v)]
        low, high = min(finite, default=0.0), max(finite, default=1.0)
        faint = max(0.1 * (high - low), 0.5)
        return powers.heat(title=title, about=about, low=low - faint, high=max(high, low + faint), unit="power of ten")


def _power(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return value
    return math.log10(value) if value else ZERO
