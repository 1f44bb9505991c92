"""The card of a rule: everything a person may want to know of it, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.findings.finding import Safety, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A rule's code, name and page. The name is the bad pattern and reads after "allow"."""

    code: str
    name: str
    severity: Severity
    what: str
    why: str
    example: str
    instead: str
    since: str = "0.1.0"
    fix: Safety = Safety.SHOWN
    unfixed: str = ""
    """Why no edit mends the fault, where none does."""
    speakers: tuple[str, ...] = ("check", "watch")
    needs: tuple[str, ...] = ()
    """Measurements without which the rule is not asked."""
    path: str = "example.py"
    """Name under which the example is read (for a rule that depends on it)."""
