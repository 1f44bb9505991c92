"""A certificate: each claim, whether it held, the figure, and the tolerance with where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Topic(str, Enum):
    """What a line is about; the order is that of the certificate."""

    SPLITS = "one global batch, split differently"
    SKIPS = "clipping and skipped updates"
    PRECISION = "precisions against FP32"
    RANKS = "one process against two ranks"
    RESUME = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One claim.

    Attributes:
        topic: what it belongs to.
        claim: what should hold.
        holds: whether it does; None where it could not be asked, which `note` explains.
        figure: what was found, in words with its number.
        tolerance: what was allowed, and where that comes from.
        note: what one should know besides.
    """

    topic: Topic
    claim: str
    holds: bool | None
    figure: str = ""
    tolerance: str = ""
    note: str = ""

    @property
    def verdict(self) -> str:
        """One word."""
        return {True: "held", False: "NOT HELD", None: "not asked"}[self.holds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """All claims about one model.

    Attributes:
        subject: what was certified, in words.
        machine: where, in words.
        lines: the claims.
        notes: what holds for all of them, such as what was done about dropout.
        seconds: how long it took.
    """

    subject: str
    machine: str
    lines: Sequence[Line]
    notes: Sequence[str]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether no claim failed."""
        return all(line.holds is not False for line in self.lines)

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        held = sum(line.holds is True for line in self.lines)
        failed = sum(line.holds is False for line in self.lines)
        unasked = len(self.lines) - held - failed
        rest = f" {unasked} could not be asked; each says why." if unasked else ""
        return f"{held} of {held + failed} claims held.{rest}" if failed else f"All {held} claims held.{rest}"

    def to_dict(self) -> dict[str, Any]:
        """The certificate as plain data."""
        lines = [{**asdict(line), "topic": line.topic.value} for line in self.lines]
        return {**asdict(self), "holds": self.holds, "headline": self.headline, "lines": lines}
