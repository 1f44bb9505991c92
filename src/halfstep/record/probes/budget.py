"""How much of a run's time a probe may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_UPDATES = 3
"""So many are always measured, however short the run."""


class Budget:
    """Allows a measurement while all of them together took less than a share of the time since the first.

    Args:
        share: of the time that has passed; infinity measures every update.
        clock: gives seconds.
        closed: whether nothing may be measured now, whatever the time.
    """

    def __init__(
        self,
        share: float = 0.01,
        clock: Callable[[], float] = time.perf_counter,
        closed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._share, self._clock, self._closed = share, clock, closed
        self._begun: float | None = None
        self._spent_s = 0.0
        self._count = 0

    def allows(self) -> bool:
        """Whether there is time for one more."""
        if self._closed():
            return False
        now = self._clock()
        if self._begun is None:
            self._begun = now
        return self._count < FIRST_UPDATES or self._spent_s <= self._share * (now - self._begun)

    @contextmanager
    def spending(self, *, begins: bool) -> Iterator[None]:
        """Count the time of what is done inside; `begins` counts one measurement."""
        start = self._clock()
        try:
            yield
        finally:
            self._spent_s += self._clock() - start
            self._count += begins
