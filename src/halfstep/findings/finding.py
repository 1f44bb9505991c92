"""A finding: one fault at one place, with why and what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from halfstep.events.vocabulary import Place


class Severity(str, Enum):
    """How much a finding matters, most first."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    PERF = "perf"
    STYLE = "style"

    @property
    def weight(self) -> int:
        """4 for an error down to 0 for style."""
        return 4 - list(Severity).index(self)


class Safety(str, Enum):
    """What a fix does to the numbers."""

    SAFE = "safe"
    UNSAFE = "unsafe"
    SHOWN = "shown"


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the text between two positions (line from 1, column in characters from 0) by `text`."""

    line: int
    column: int
    end_line: int
    end_column: int
    text: str


@dataclass(frozen=True, slots=True)
class Fix:
    """Edits of one file that remove the fault, and how safe they are."""

    edits: tuple[Edit, ...]
    safety: Safety
    title: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """What a rule reports: a place and a sentence; the judge adds the rest from the card."""

    place: Place | None
    message: str
    fix: FixRequest | None = None


@dataclass(frozen=True, slots=True)
class FixRequest:
    """What should change, in terms of statements at places; the editor turns it into text edits.

    `action` names one of `halfstep.imagine.fixing.actions`, whose docstring says what `text` and `other` are to it.
    """

    action: str
    place: Place
    text: str = ""
    other: Place | None = None
    position: int | None = None
    """Of the argument of a keyword that may also be given without its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault, complete."""

    rule: str
    code: str
    severity: Severity
    path: str
    line: int
    column: int
    message: str
    end_line: int = 0
    end_column: int = 0
    world: str = ""
    why: str = ""
    fix: Fix | None = None
    request: FixRequest | None = field(default=None, compare=False)
    cell: int | None = None
