"""The events of a run as they are heard, in bounded memory: the first ones, and a ring of the latest."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from halfstep.events.vocabulary import Event, Made
from halfstep.record.places import Here

HEAD = 12_000
"""Events kept from the start of a run."""
RING = 6_000
"""Latest events kept after those; what follows the start is heard in stretches."""
OBJECTS = 400
"""Constructions kept for the objects that later events concern."""


@dataclass(slots=True)
class Draft:
    """An event before it is told: `extra` holds measurements for which the event has no field."""

    kind: type[Event]
    serial: int
    here: Here
    fields: dict[str, Any]
    extra: dict[str, Any] | None = None


@dataclass(slots=True)
class Tape:
    """What was heard. `head` never changes once it is full; `ring` holds the latest."""

    head: list[Draft] = field(default_factory=list)
    ring: deque[Draft] = field(default_factory=lambda: deque(maxlen=RING))
    made: list[Draft] = field(default_factory=list)
    """Objects made after the head was full."""
    before: list[Draft] = field(default_factory=list)
    """The stretch before the ring's, told where the ring's is too short to say anything."""
    heard: int = 0

    @property
    def is_late(self) -> bool:
        """Whether the start of the run is full."""
        return self.heard >= HEAD

    def begin_stretch(self) -> None:
        """What comes does not follow what was heard last."""
        self.before = list(self.ring)
        self.ring.clear()

    def add(self, kind: type[Event], here: Here, fields: dict[str, Any], extra: dict[str, Any] | None = None) -> Draft:
        """Keep an event."""
        draft = Draft(kind, self.heard, here, fields, extra)
        self.heard += 1
        if self.heard <= HEAD:
            self.head.append(draft)
        else:
            self.ring.append(draft)
            if kind is Made and len(self.made) < OBJECTS:
                self.made.append(draft)
        return draft

    def parts(self) -> list[list[Draft]]:
        """The stretches of the run that were kept whole: one, or its start and its latest part."""
        ring = list(self.ring)
        if len(ring) < len(self.before) // 2:
            ring = self.before
        if not ring or (self.heard <= HEAD + RING and not self.before):
            return [self.head + ring]
        first = ring[0].serial
        objects = [d for d in self.head if d.kind is Made] + [d for d in self.made if d.serial < first]
        return [self.head, objects + _from_a_boundary(ring)]


def _from_a_boundary(ring: list[Draft]) -> list[Draft]:
    """The ring from the first beginning of an epoch, or from what follows the first step."""
    names = [draft.kind.__name__ for draft in ring]
    if "EpochBegin" in names[: len(names) // 2]:
        return ring[names.index("EpochBegin") :]
    stepped = names.index("Step") if "Step" in names else 0
    starts = [i for i in range(stepped, len(ring)) if names[i] in ("Fetch", "Forward")]
    return ring[starts[0] :] if starts else []
