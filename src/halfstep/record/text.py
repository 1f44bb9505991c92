"""What the text of the script adds to what was heard: the meaning of numbers, and faults that no hook can hear."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from halfstep.events.trace import Fact, Story, Trace
from halfstep.events.vocabulary import Backward, Divisor, Event, Forward, Made, Place, SchedulerStep, Step, Turn
from halfstep.findings.finding import Finding
from halfstep.findings.registry import Rule
from halfstep.imagine.project import parse
from halfstep.imagine.story import tell
from halfstep.record.syntax import syntax_of
from halfstep.rules.judge import judge

BY_TEXT = frozenset(
    {
        *("amp-bce-under-autocast", "amp-dtype-default-mismatch", "amp-fp16-eps", "amp-fp16-mask-overflow"),
        *("amp-gradpenalty-scaled", "amp-loss-half-reduction", "amp-read-scaled-grads", "amp-deprecated-api"),
        *("accum-skip-breaks-window", "accum-state-per-micro"),
        *("data-avg-weighting", "data-cuda-in-worker", "data-iterable-duplicate", "data-loss-graph-retained"),
        *("data-nonblocking-d2h-race", "data-nonblocking-no-pin", "data-persistent-epoch", "data-worker-rng"),
        *("ddp-device-not-set", "ddp-double-average", "ddp-load-no-map-location", "ddp-metrics-local"),
        *("ddp-rank-conditional-collective", "ddp-rank-local-skip", "ddp-rank-local-stop", "ddp-same-seed"),
        *("ddp-save-all-ranks", "ddp-uneven-inputs", "ddp-unused-params"),
        *("sched-args-swapped", "sched-lambda-absolute", "sched-plateau-mode", "sched-total-steps-micro", "sched-unit-mismatch"),
    }
)
"""Rules that ask for what only the text says: the name of a metric, the unit of a length, the value of a constant."""


@dataclass(slots=True)
class Text:
    """The user's files, read and imagined."""

    stories: dict[str, Story] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    _made: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)
    _tags: dict[tuple[str, int], Turn] = field(default_factory=dict)
    _divisors: dict[tuple[str, int], tuple[Divisor, ...]] = field(default_factory=dict)
    _metrics: dict[tuple[str, int], str] = field(default_factory=dict)

    def read(self, path: str) -> None:
        """Read and imagine a file."""
        if path in self.sources:
            return
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        tree = parse(text)
        if tree is None:
            return
        self.sources[path] = text
        self.stories[path] = story = tell(tree, path)
        for trace in story.traces:
            for event in trace.events:
                self._note(event)

    def _note(self, event: Event) -> None:
        for turn in event.loops:
            if turn.place is not None and turn.tags:
                self._tags.setdefault(_line(turn.place), turn)
        if event.place is None:
            return
        if isinstance(event, Made):
            self._made.setdefault((event.what.kind, *_line(event.place)), event.facts)
        elif isinstance(event, Backward) and event.divisors:
            self._divisors.setdefault(_line(event.place), event.divisors)
        elif isinstance(event, SchedulerStep) and event.metric:
            self._metrics.setdefault(_line(event.place), event.metric)

    def facts(self) -> tuple[Fact, ...]:
        """What the texts say besides their events."""
        return tuple(fact for story in self.stories.values() for fact in story.facts)

    def annotated(self, event: Event) -> Event:
        """An event with what the text says of its numbers."""
        if event.loops and any(_line(t.place) in self._tags for t in event.loops if t.place is not None):
            event = replace(event, loops=tuple(self._turn(t) for t in event.loops))
        if event.place is None:
            return event
        at = _line(event.place)
        if isinstance(event, Made):
            said = self._made.get((event.what.kind, *at), {})
            kept = {k: v for k, v in said.items() if k in _ADDED and k not in event.facts}
            return replace(event, facts={**event.facts, **kept}) if kept else event
        if isinstance(event, Backward) and at in self._divisors:
            return replace(event, divisors=_tagged(event.divisors, self._divisors[at]))
        if isinstance(event, SchedulerStep) and at in self._metrics:
            return replace(event, metric=self._metrics[at])
        return event

    def _turn(self, turn: Turn) -> Turn:
        said = self._tags.get(_line(turn.place)) if turn.place is not None else None
        return replace(turn, tags=said.tags) if said is not None else turn

    def findings(self, rules: Sequence[Rule], traces: Sequence[Trace], *, whole: bool) -> list[Finding]:
        """Faults in the text that hold in every world; what no hook can hear also where it holds for some data or rank.

        Args:
            rules: those that said nothing of what was heard, or do not judge it.
            traces: what was heard; what hooks can hear is not told of functions that did not run.
            whole: whether all rules go by the text alone.
        """
        found = [f for story in self.stories.values() for f in judge(story, rules)]
        idle = _functions(t for story in self.stories.values() for t in story.traces) - _functions(traces)
        return [f for f in found if _holds(f, idle, free=whole or f.rule in BY_TEXT)]


_ADDED = ("horizon", "absolute", "site", "tags", "dataset name", "cast at")
"""Facts of a construction that only the text tells."""


def _holds(found: Finding, idle: set[tuple[str, int]], *, free: bool) -> bool:
    if free:
        return not found.world or found.world.startswith("on rank") or "as usual" in found.world
    return not found.world and _function(Place(found.path, found.line, found.column - 1)) not in idle


def _functions(traces: Iterable[Trace]) -> set[tuple[str, int]]:
    """The functions through which a loop goes, by file and number."""
    events = (event for trace in traces for event in trace.of(Forward, Backward, Step))
    return {_function(place) for event in events for place in (*event.stack, event.place) if place is not None}


def _function(place: Place) -> tuple[str, int]:
    syntax = syntax_of(place.path)
    return (place.path, -1 if syntax is None else syntax.scope((place.line, place.column)))


def _line(place: Place) -> tuple[str, int]:
    return (place.path, place.line)


def _tagged(heard: tuple[Divisor, ...], said: tuple[Divisor, ...]) -> tuple[Divisor, ...]:
    """The divisors that were heard, with the tags and places of those that the text has at this line."""
    if len(heard) != len(said):
        return heard
    return tuple(replace(h, tags=s.tags, place=s.place) for h, s in zip(heard, said, strict=True))
