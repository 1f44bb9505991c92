"""The loop: an update, the log, a look at the held-out text, and whether to stop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from halfstep.engine import Engine
from halfstep.train.book import Book
from halfstep.train.judge import Judge
from halfstep.train.limits import Limits, Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Everything that a loop needs.

    Attributes:
        engine: performs the updates.
        loader: the micro-batches of this rank.
        epochs: passes over the data; `None` for as many as the limits allow.
        book: keeps count and tells the listeners.
        judge: looks at the held-out text.
        limits: the limits that updates and tokens reach.
        stop: signals and the clock.
    """

    engine: Engine
    loader: Iterable[Any]
    epochs: int | None
    book: Book
    judge: Judge
    limits: Limits
    stop: Stop

    def run(self) -> str:
        """Train until something ends the run, and say what did."""
        because = self._updates()
        self.book.settle()
        self.stop.close()
        if self.stop.signal is None and self.judge.is_due_at_end(self.book.updates):
            self._look()
        return because

    def _updates(self) -> str:
        for update in self.engine.updates(self.loader, epochs=self.epochs):
            self.book.enter(update)
            if self.judge.is_due(update.index):
                self._look()
            because = self.limits.reached(self.book.applied, self.book.tokens) or self.stop.reached()
            if because is not None:
                return because
        return f"{self.epochs} {'epoch' if self.epochs == 1 else 'epochs'} of the data are done"

    def _look(self) -> None:
        with self.book.pause():
            self.book.tell(self.judge.look(self.book.updates))
