"""Ends a run whose held-out data are predicted no better any more."""

from __future__ import annotations

from halfstep.train.record import EvaluationRecord


class EarlyStop:
    """Counts looks at the held-out data without a better one.

    Args:
        patience: looks in a row that may pass without a better one.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self.best: EvaluationRecord | None = None
        """The best look so far."""
        self.looks_since = 0
        """Looks since it."""

    def resume(self, best: EvaluationRecord | None, looks_since: int) -> None:
        """Take up what was counted before."""
        self.best, self.looks_since = best, looks_since

    def look(self, record: EvaluationRecord) -> str | None:
        """What ends the run after this look, in words, or `None`."""
        if record.best:
            self.best, self.looks_since = record, 0
            return None
        self.looks_since += 1
        if self.looks_since < self._patience:
            return None
        best = "a loss that is a number" if self.best is None else self.best.to_text()
        return f"{self.looks_since} looks in a row were not better than {best}"
