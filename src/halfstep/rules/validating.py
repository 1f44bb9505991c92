"""Where a trace validates: passes over data that is named so, from which nothing is learnt."""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfstep.events.trace import Trace
from halfstep.events.vocabulary import Backward, EpochBegin, EpochEnd, Event, Forward

NAMES = re.compile(r"(^|_|\.|\b)(val|valid|validation|test|eval|dev)(_|\b|$|[A-Z])", re.I)


def validation_passes(trace: Trace) -> Iterator[tuple[EpochBegin, list[Forward], EpochEnd]]:
    """Passes over validation data, with their forward passes; nothing is learnt from them, neither inside nor right after."""
    begin: EpochBegin | None = None
    forwards: list[Forward] = []
    for event in trace.of(EpochBegin, Forward, Backward, EpochEnd):
        if isinstance(event, EpochBegin):
            begin, forwards = event, []
        elif isinstance(event, Forward):
            forwards.append(event)
        elif isinstance(event, Backward):
            begin = None
        elif isinstance(event, EpochEnd) and begin is not None:
            named = any(map(NAMES.search, (begin.loader.name, begin.function, begin.called)))
            if named and not _learnt_from(trace, forwards, event):
                yield begin, forwards, event
            begin = None


def _learnt_from(trace: Trace, forwards: list[Forward], end: Event) -> bool:
    """Whether the next backward pass is of these models, with no forward pass of its own before it."""
    following = next((e for e in trace.of(Forward, Backward) if e.serial > end.serial), None)
    return isinstance(following, Backward) and any(f.model in following.models for f in forwards)
