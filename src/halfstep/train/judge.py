"""Looks at the held-out text every so many updates, and remembers the best."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from halfstep.train.evaluate import HeldOut, evaluate
from halfstep.train.record import EvaluationRecord


class Judge:
    """Held-out losses of a run.

    Args:
        model: what is judged.
        held_out: the text; `None` where nothing is held out, and nothing is ever due.
        every: updates between looks; 0 for never.
        keep: saves the model when it is the best so far; `None` where the best is not kept.
    """

    def __init__(self, model: nn.Module, held_out: HeldOut | None, *, every: int, keep: Callable[[], object] | None) -> None:
        self._model, self._held_out, self._every, self._keep = model, held_out, every, keep
        self.last: EvaluationRecord | None = None
        """The last look."""
        self.best: EvaluationRecord | None = None
        """The best one."""

    def is_due(self, update: int) -> bool:
        """Whether the text should be looked at after this update."""
        return self._held_out is not None and self._every > 0 and update % self._every == 0

    def is_due_at_end(self, update: int) -> bool:
        """Whether the last update has still to be judged."""
        judged = self.last is not None and self.last.update == update
        return self._held_out is not None and self._every > 0 and not judged

    def look(self, update: int) -> EvaluationRecord:
        """Judge the model after this update; every rank must call it."""
        assert self._held_out is not None
        found = evaluate(self._model, self._held_out)
        best = not math.isnan(found.loss) and (self.best is None or found.loss < self.best.loss)
        self.last = EvaluationRecord(
            update=update,
            loss=found.loss,
            nats_per_byte=found.nats_per_byte,
            perplexity=math.exp(min(found.loss, 700.0)),
            seconds=found.seconds,
            best=best,
        )
        if best:
            self.best = self.last
            if self._keep is not None:
                self._keep()
        return self.last
