"""A value together with the reason it was taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Generic[Value]):
    """What was decided, and why: every automatic value of halfstep is one of these.

    Attributes:
        value: what will be used.
        reason: one sentence, with the numbers that decided, or "asked for" where the user decided.
    """

    value: Value
    reason: str

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})"


ASKED_FOR = "asked for"
"""The reason of a value that the user gave."""
