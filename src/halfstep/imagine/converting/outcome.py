"""What a conversion is asked for, what it did and what it left."""

from __future__ import annotations

from dataclasses import dataclass, field


class NotSure(Exception):
    """A pass does not understand enough of the program; it changes nothing. The message says what and why."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason if line is None else f"line {line}: {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the loop should become.

    Attributes:
        precision: `auto`, `fp16`, `bf16`, or `fp32` for none.
        accumulate: micro-batches in an update.
        ddp: train on several ranks.
        engine: put the loop on `halfstep.Engine`.
    """

    precision: str = "auto"
    accumulate: int = 1
    ddp: bool = False
    engine: bool = False


@dataclass(slots=True)
class Conversion:
    """The new text, what was done to it, and what was left with the reason."""

    text: str
    done: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
