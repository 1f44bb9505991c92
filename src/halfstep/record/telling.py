"""From drafts to traces: epochs that nobody announced are noticed, and the events get their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from halfstep.events.vocabulary import EpochBegin, EpochEnd, Event, Fetch, Made, Ref, RunBegin, RunEnd, Turn
from halfstep.record.ranks import Shared
from halfstep.record.recorder import Recorder
from halfstep.record.samples import Coverage
from halfstep.record.syntax import items_name
from halfstep.record.tape import Draft


@dataclass(slots=True, kw_only=True)
class Heard:
    """What one process heard, as plain data that can be sent to another."""

    rank: int | None
    size: int
    stretches: tuple[tuple[Event, ...], ...]
    """One, or the start of the run and its latest part."""
    files: frozenset[str]
    updates: int
    ending: str = ""
    """How the script ended in this process: empty when it came to its end."""
    shared: Shared = field(default_factory=Shared)
    """What ranks must have alike."""
    samples: tuple[Coverage, ...] = ()
    """What its loaders handed out."""
    measured: dict[str, Any] = field(default_factory=dict)
    """What the probes found and measured: `findings` and `parts`."""
    fault: str = ""
    """Why the recording ended before the script, if it did."""
    unheard: tuple[str, ...] = ()
    """Commands by which it started scripts that were not followed."""


def tell(rec: Recorder) -> tuple[tuple[Event, ...], ...]:
    """The events of every stretch of the tape."""
    parts = rec.tape.parts()
    return tuple(
        tuple(replace(event, serial=serial) for serial, event in enumerate(_Teller(rec).told(part, last=part is parts[-1])))
        for part in parts
    )


@dataclass(slots=True)
class _Open:
    """A loop over batches that runs."""

    loader: Ref
    index: int
    outer: tuple[Turn, ...]
    turn: int


class _Teller:
    def __init__(self, rec: Recorder) -> None:
        self.fed = rec.places.fed
        self.open: dict[int, _Open] = {}
        self.passes: dict[str, int] = {}
        self.turns: dict[Turn, Turn] = {}
        self.epochs: dict[Ref, int] = {}

    def told(self, drafts: list[Draft], *, last: bool) -> Iterator[Event]:
        yield RunBegin()
        for draft in drafts:
            yield from self.left(draft)
            yield from self.entered(draft)
            if not self.still_runs(draft):
                yield self.event(draft)
        if last:
            for number in reversed(list(self.open)):
                yield from self.closed(number)
            yield RunEnd()

    def left(self, draft: Draft) -> Iterator[Event]:
        """Ends of loops that this event lies outside of."""
        running = {turn.loop for turn in draft.here.loops}
        for number in reversed(list(self.open)):
            if number not in running and not self.still_runs(draft) and (draft.kind is not Made or draft.here.loops):
                yield from self.closed(number)

    def still_runs(self, draft: Draft) -> bool:
        """A loader that reads ahead says its end before the last turn of its loop: the epoch ends where the loop is left."""
        return draft.kind is EpochEnd and any(loop.loader == draft.fields["loader"] for loop in self.open.values())

    def closed(self, number: int) -> Iterator[Event]:
        loop = self.open.pop(number)
        yield EpochEnd(loader=loop.loader, index=loop.index, loops=self.mapped(loop.outer))

    def entered(self, draft: Draft) -> Iterator[Event]:
        """Beginnings and turns of loops over batches that no loader announces."""
        loops = draft.here.loops
        for depth, turn in enumerate(loops):
            if turn.loop in self.fed or turn.over != "loader" or turn.place is None:
                continue
            loop = self.open.get(turn.loop)
            stack = draft.here.stack[: depth + 1]
            if loop is None:
                name = items_name(turn.place)
                loader = Ref("loader", -turn.place.line, name, turn.place)
                index = self.passes[name] = self.passes.get(name, -1) + 1
                loop = self.open[turn.loop] = _Open(loader, index, loops[:depth], -1)
                yield EpochBegin(
                    loader=loader, index=index, function=draft.here.function, place=turn.place, loops=self.mapped(loops[:depth])
                )
            if loop.turn != turn.index:
                loop.turn = turn.index
                yield Fetch(
                    loader=loop.loader,
                    micro_batch=turn.index,
                    place=turn.place,
                    stack=stack,
                    loops=self.mapped(loops[: depth + 1]),
                )

    def event(self, draft: Draft) -> Event:
        here = draft.here
        if draft.kind is EpochBegin:
            self.epochs[draft.fields["loader"]] = draft.fields["index"]
        if draft.kind is Fetch and here.loops and here.loops[-1].loop in self.fed:
            loader = draft.fields["loader"]
            self.open.setdefault(
                here.loops[-1].loop, _Open(loader, self.epochs.get(loader, 0), here.loops[:-1], here.loops[-1].index)
            )
        return draft.kind(place=here.place, stack=here.stack, loops=self.mapped(here.loops), **draft.fields)

    def mapped(self, loops: tuple[Turn, ...]) -> tuple[Turn, ...]:
        """The turns with what is known now of what their loops run over."""
        return tuple(self.turn(turn) for turn in loops)

    def turn(self, turn: Turn) -> Turn:
        if turn.loop not in self.fed:
            return turn
        return self.turns.setdefault(turn, Turn(turn.loop, turn.index, turn.place, "loader"))
