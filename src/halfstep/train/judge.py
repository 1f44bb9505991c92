"""Looks at the held-out data every so many updates, and remembers the best."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import nn

from halfstep.config.options import Metric
from halfstep.train.evaluate import HeldOut, Judgement, evaluate
from halfstep.train.record import EvaluationRecord


class Judge:
    """The looks of a run at its held-out data.

    Args:
        model: what is judged.
        held_out: the data; `None` where nothing is held out, and nothing is ever due.
        every: updates between looks; 0 for never.
        keep: saves the model when it is the best so far; `None` where the best is not kept.
    """

    def __init__(self, model: nn.Module, held_out: HeldOut | None, *, every: int, keep: Callable[[], object] | None) -> None:
        self._model, self._held_out, self._every, self._keep = model, held_out, every, keep
        self.last: EvaluationRecord | None = None
        """The last look."""
        self.best: EvaluationRecord | None = None
        """The best one."""

    def state(self) -> dict[str, Any]:
        """The last look and the best one, as plain types."""
        return {name: None if look is None else asdict(look) for name, look in (("last", self.last), ("best", self.best))}

    def resume(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave."""
        looks = {name: None if look is None else EvaluationRecord(**look) for name, look in state.items()}
        self.last, self.best = looks["last"], looks["best"]

    def is_due(self, update: int) -> bool:
        """Whether the data should be looked at after this update."""
        return self._held_out is not None and self._every > 0 and update % self._every == 0

    def is_due_at_end(self, update: int) -> bool:
        """Whether the last update has still to be judged."""
        judged = self.last is not None and self.last.update == update
        return self._held_out is not None and self._every > 0 and not judged

    def look(self, update: int) -> EvaluationRecord:
        """Judge the model after this update; every rank must call it."""
        assert self._held_out is not None
        found = evaluate(self._model, self._held_out)
        bytes_per_token, metric = self._held_out.bytes_per_token, self._held_out.metric
        self.last = EvaluationRecord(
            update=update,
            loss=found.loss,
            seconds=found.seconds,
            best=self._is_best(found, metric),
            nats_per_byte=None if bytes_per_token is None else found.loss / bytes_per_token,
            perplexity=math.exp(min(found.loss, 700.0)) if metric is Metric.PERPLEXITY else None,
            accuracy=found.accuracy,
        )
        if self.last.best:
            self.best = self.last
            if self._keep is not None:
                self._keep()
        return self.last

    def _is_best(self, found: Judgement, metric: Metric) -> bool:
        """Whether no look before was as good; a loss that is no number is never good."""
        if math.isnan(found.loss) or self.best is None:
            return not math.isnan(found.loss)
        if metric is Metric.ACCURACY and found.accuracy != self.best.accuracy:
            return (found.accuracy or 0.0) > (self.best.accuracy or 0.0)
        return found.loss < self.best.loss
