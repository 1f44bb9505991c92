"""Ends a run whose held-out loss has stopped getting better."""

from __future__ import annotations

import math


class EarlyStop:
    """Counts looks at the held-out data without a better one.

    Args:
        patience: looks in a row that may pass without a better one.
        least_gain: by how much a look must be better than the best to count as better.
    """

    def __init__(self, patience: int, *, least_gain: float = 0.0) -> None:
        self._patience, self._least_gain = patience, least_gain
        self.best = math.inf
        """The least loss so far."""
        self.looks_since = 0
        """Looks since it was found."""

    def look(self, loss: float) -> str | None:
        """What ends the run after a look that found this loss, in words, or `None`. A NaN is no better than anything."""
        if loss < self.best - self._least_gain:
            self.best, self.looks_since = loss, 0
            return None
        self.looks_since += 1
        if self.looks_since < self._patience:
            return None
        least = f" by {self._least_gain:g}" if self._least_gain else ""
        return f"{self.looks_since} looks in a row were not better{least} than a held-out loss of {self.best:.4f}"
