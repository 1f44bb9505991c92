"""What is said about a run while it goes, and to whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """One update, as it is logged.

    Attributes:
        update: updates so far, this one counted, skipped ones too.
        applied: applied updates so far.
        epoch: the pass over the data, from 0.
        done: how much of the run is behind it, from 0 to 1.
        loss: the global weighted mean over the update's tokens, in nats per token.
        grad_norm: the norm of the true gradient, before clipping.
        lr: the learning rate that the update used, or would have used.
        scale: the loss scale; `None` where there is none.
        tokens: tokens that counted, over all ranks.
        seconds: wall time since the update before, evaluation and saving left out.
        elapsed_s: wall time since the start of training.
        memory_bytes: the highest use of memory so far; `None` where it is not known.
        skipped_because: why the update was skipped; `None` if it was applied.
    """

    update: int
    applied: int
    epoch: int
    done: float
    loss: float
    grad_norm: float
    lr: float
    scale: float | None
    tokens: int
    seconds: float
    elapsed_s: float
    memory_bytes: int | None
    skipped_because: str | None

    @property
    def tokens_per_s(self) -> float:
        """Tokens that counted over wall time."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """One look at the held-out text.

    Attributes:
        update: updates so far.
        loss: the weighted mean in nats per token.
        nats_per_byte: the same per byte of text, which is comparable between tokenizers.
        perplexity: e to the loss.
        tokens: tokens that were predicted.
        seconds: wall time it took.
        best: whether no evaluation before was better.
    """

    update: int
    loss: float
    nats_per_byte: float
    perplexity: float
    tokens: int
    seconds: float
    best: bool


class Listener(Protocol):
    """Somebody who is told about a run while it goes: a log, a chart, a progress bar."""

    def on_update(self, record: UpdateRecord) -> None:
        """Hear of an update."""

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Hear of an evaluation."""

    def close(self) -> None:
        """Hear that nothing more will come."""
