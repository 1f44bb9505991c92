"""A finding from a card, a line and what was measured."""

from __future__ import annotations

from halfstep.events.vocabulary import Place
from halfstep.findings.card import Card
from halfstep.findings.finding import Finding


def finding(card: Card, place: Place | None, message: str) -> Finding:
    """What a probe found; a place that nobody knows is line 0 of "unknown"."""
    return Finding(
        rule=card.name,
        code=card.code,
        severity=card.severity,
        path=place.path if place else "unknown",
        line=place.line if place else 0,
        column=(place.column if place else 0) + 1,
        message=message,
        why=card.why,
    )
