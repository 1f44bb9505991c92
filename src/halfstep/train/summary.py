"""What a run came to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from halfstep.train.record import EvaluationRecord


class Ending(str, Enum):
    """How a run ended."""

    FINISHED = "finished"
    """A limit was reached, or the data ended."""
    INTERRUPTED = "interrupted"
    """Ctrl-C or SIGTERM."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Tokens per second over the updates of a run: median, and the tenth and ninetieth of a hundred updates."""

    median: float
    low: float
    high: float
    updates: int

    def to_text(self, unit: str) -> str:
        """The rate and its spread in words."""
        spread = f"10% to 90%: {self.low:,.0f} to {self.high:,.0f}"
        return f"{self.median:,.0f} {unit}/s (median of {self.updates:,} updates; {spread})"


def rate_of(tokens_per_s: Sequence[float]) -> Rate | None:
    """The rate over updates; the first is left out where there are more, because it pays for warming up."""
    counted = sorted(tokens_per_s[1:] or tokens_per_s)
    if not counted:
        return None
    last = len(counted) - 1
    return Rate(
        median=statistics.median(counted),
        low=counted[round(0.1 * last)],
        high=counted[round(0.9 * last)],
        updates=len(counted),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The end report.

    Attributes:
        ending: how the run ended.
        because: what ended it, in words.
        planned_updates: applied updates that were planned; `None` where only the clock was to end the run.
        applied_updates: updates that moved the weights.
        skipped: by cause, updates that did not.
        tokens: tokens that counted, over all ranks.
        wall_s: wall time of training, with evaluation and saving.
        rate: tokens per second; `None` without an update.
        unit: what those tokens are: "tokens", or "images", "texts", "samples" where they are none.
        final: the look at the held-out data at the end; `None` where nothing was held out or the end was not judged.
        best: the best look.
        train_loss: loss of the last update that was applied, of language models in nats per token.
        unigram_nats_per_byte: what the held-out text costs who knows the frequency of each byte and no more.
        peak_memory_bytes: the highest use of memory; `None` where it is not known.
    """

    ending: Ending
    because: str
    planned_updates: int | None
    applied_updates: int
    skipped: Mapping[str, int]
    tokens: int
    wall_s: float
    rate: Rate | None
    final: EvaluationRecord | None
    best: EvaluationRecord | None
    train_loss: float | None
    unigram_nats_per_byte: float | None
    peak_memory_bytes: int | None
    unit: str = "tokens"

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        return {**asdict(self), "ending": self.ending.value}

    def to_text(self) -> str:
        """The report as lines of a name and a value."""
        lines = {
            str(self.ending): self.because,
            "updates": self._updates_text(),
            "skipped": ", ".join(f"{count} {cause}" for cause, count in self.skipped.items()) or "none",
            self.unit: f"{self.tokens:,} in {_time_text(self.wall_s)}",
            "rate": "unknown" if self.rate is None else self.rate.to_text(self.unit),
            "memory": "unknown" if self.peak_memory_bytes is None else f"{self.peak_memory_bytes / 1e9:.2f} GB at most",
            "loss": self._loss_text(),
        }
        return "\n".join(f"{name:<12}{value}" for name, value in lines.items())

    def _updates_text(self) -> str:
        planned = "" if self.planned_updates is None else f" of {self.planned_updates:,} planned"
        return f"{self.applied_updates:,} applied{planned}"

    def _loss_text(self) -> str:
        if self.best is None:
            unit = " nats a token" if self.unit == "tokens" else ""
            last = "unknown" if self.train_loss is None else f"{self.train_loss:.3f}{unit} in the last update"
            return f"{last}; no held-out data were looked at"
        if self.best.nats_per_byte is None:
            final = "not judged at the end" if self.final is None else f"held-out {self.final.to_text()}"
            return f"{final}; best after update {self.best.update:,}: {self.best.to_text()}"
        return self._text_of_bytes(self.best, self.best.nats_per_byte)

    def _text_of_bytes(self, best: EvaluationRecord, best_nats: float) -> str:
        final_nats = None if self.final is None else self.final.nats_per_byte
        final = "not judged at the end" if final_nats is None else f"{final_nats:.3f}"
        text = f"{final} nats a byte of held-out text, best {best_nats:.3f} after update {best.update:,}"
        if self.unigram_nats_per_byte is None:
            return text
        share = (final_nats or best_nats) / self.unigram_nats_per_byte
        return f"{text}; unigram entropy {self.unigram_nats_per_byte:.3f} ({share:.0%} of it)"


def _time_text(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f} min {rest:.1f} s" if minutes else f"{rest:.1f} s"
