"""Numbers over a run of any length, in a bounded number of points."""

from __future__ import annotations

import math
from collections.abc import Iterator

from halfstep.report.parts import Series

MOST_POINTS = 1024


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
