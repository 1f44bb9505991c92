"""How many sequences a text has, and how many updates a run will be."""

from __future__ import annotations

from halfstep.config.facts import Cut
from halfstep.config.options import Tail
from halfstep.config.run import BatchRun, LimitsRun


def num_windows(tokens: int, sequence_length: int) -> int:
    """Sequences in a text: neighbours share one token, so that every token but the first is predicted once."""
    return max(0, -(-(tokens - 1) // (sequence_length - 1)))


def planned_updates(limits: LimitsRun, batch: BatchRun, cut: Cut) -> int | None:
    """Applied updates until the first limit is reached; `None` where only the clock ends the run."""
    ends = [] if limits.updates is None else [limits.updates]
    if limits.epochs is not None:
        ends.append(_updates_of_epochs(limits.epochs, batch, cut.sequences))
    if limits.tokens is not None:
        ends.append(-(-limits.tokens * cut.sequences // max(1, batch.global_ * cut.predicted)))
    return min(ends, default=None)


def _updates_of_epochs(epochs: int, batch: BatchRun, windows: int) -> int:
    if batch.tail is Tail.DROP:
        return epochs * (windows // batch.global_)
    if batch.tail is Tail.CARRY:
        return -(-epochs * windows // batch.global_)
    return epochs * -(-windows // batch.global_)
