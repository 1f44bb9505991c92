"""The loop: an update, the log, a look at the held-out text, and whether to stop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from halfstep.engine import Engine
from halfstep.train.book import Book
from halfstep.train.early_stop import EarlyStop
from halfstep.train.judge import Judge
from halfstep.train.limits import Limits, Stop
from halfstep.train.record import EvaluationRecord
from halfstep.train.saving import Saver


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Everything that a loop needs.

    Attributes:
        engine: performs the updates.
        loader: the micro-batches of this rank.
        epochs: passes over the data; `None` for as many as the limits allow.
        book: keeps count and tells the listeners.
        judge: looks at the held-out text.
        early: ends the run when the held-out loss gets no better; `None` where only the limits do.
        limits: the limits that updates and tokens reach.
        stop: signals and the clock.
        saver: saves the run while it goes, and when a signal ends it.
    """

    engine: Engine
    loader: Iterable[Any]
    epochs: int | None
    book: Book
    judge: Judge
    early: EarlyStop | None
    limits: Limits
    stop: Stop
    saver: Saver

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
            look = self._look() if self.judge.is_due(update.index) else None
            because = self._reached()
            if because is None and look is not None and self.early is not None:
                because = self.early.look(look)
            if self.stop.save or self.saver.is_due(update.index) or self.stop.signal is not None:
                self.saver.save()
            if because is not None:
                return because
        return f"{self.epochs} {'epoch' if self.epochs == 1 else 'epochs'} of the data are done"

    def _reached(self) -> str | None:
        limit = self.limits.reached(self.book.applied, self.book.tokens)
        return limit or self.stop.reached(save=self.saver.is_late)

    def _look(self) -> EvaluationRecord:
        with self.book.pause():
            record = self.judge.look(self.book.updates)
            self.book.tell(record)
        return record
