"""What became of every update."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Protocol


class Cause(str, Enum):
    """Why an update was skipped."""

    CALIBRATION = "calibration"
    """FP16 gradients overflowed before any update was applied: the loss scale is still finding its level."""
    OVERFLOW = "overflow"
    """Gradients were not finite, while data, loss and weights were."""
    LOSS = "loss not finite"
    """The loss was not finite, while data and weights were."""
    DATA = "data not finite"
    """A batch held a NaN or an infinity."""
    WEIGHTS = "weights not finite"
    """A parameter held a NaN or an infinity before the update."""
    NO_WEIGHT = "no weight"
    """Nothing counted in the whole window: every label was masked."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One update, settled.

    Attributes:
        index: number of the update, from 1, applied or not.
        applied: whether the parameters moved.
        cause: why they did not; None where they did.
        detail: where the cause was found, in words; empty where there is nothing to add.
        loss: global weighted mean loss of the window.
        grad_norm: norm of the true gradient, before clipping.
        scale: loss scale under which backward ran; 1.0 without scaling.
        weight: global weight (tokens or samples that counted).
        micro_batches: micro-batches of this rank.
    """

    index: int
    applied: bool
    cause: Cause | None
    detail: str
    loss: float
    grad_norm: float
    scale: float
    weight: float
    micro_batches: int

    def to_dict(self) -> dict[str, Any]:
        """The entry as JSON types."""
        return {**asdict(self), "cause": self.cause.value if self.cause else None}


class Settled(Protocol):
    """An update of which it is known whether it was applied."""

    @property
    def applied(self) -> bool:
        """Whether the parameters moved."""

    @property
    def entry(self) -> Entry:
        """The update as plain numbers."""


class Ledger:
    """Applied and skipped updates: counts of all, entries of the last ones and of every skip.

    Args:
        keep: how many of the last entries are kept.
    """

    def __init__(self, keep: int = 10_000) -> None:
        self._last: deque[Settled] = deque(maxlen=keep)
        self.skips: list[Entry] = []
        """Every skipped update."""
        self.applied = 0
        """Number of updates that moved the parameters."""
        self.skipped_in_a_row = 0
        """Number of skipped updates since the last applied one."""

    def record(self, update: Settled) -> None:
        """Add a settled update."""
        self._last.append(update)
        if update.applied:
            self.applied += 1
            self.skipped_in_a_row = 0
        else:
            self.skips.append(update.entry)
            self.skipped_in_a_row += 1

    def only_masked(self, since: int) -> bool:
        """Whether there were updates after number `since`, and nothing counted in any of them."""
        skips = [skip for skip in self.skips if skip.index > since and skip.cause is Cause.NO_WEIGHT]
        return len(skips) == len(self) - since > 0

    def causes(self) -> dict[str, int]:
        """Number of skipped updates by cause."""
        return dict(Counter(str(entry.cause) for entry in self.skips))

    def state_dict(self) -> dict[str, Any]:
        """Counts and skipped updates as plain types."""
        return {
            "applied": self.applied,
            "in_a_row": self.skipped_in_a_row,
            "skips": [skip.to_dict() for skip in self.skips],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up saved counts; the entries of applied updates before are not kept."""
        self.applied, self.skipped_in_a_row = state["applied"], state["in_a_row"]
        self.skips = [Entry(**{**skip, "cause": Cause(skip["cause"])}) for skip in state["skips"]]

    def __iter__(self) -> Iterator[Entry]:
        return (update.entry for update in self._last)

    def __len__(self) -> int:
        return self.applied + len(self.skips)
