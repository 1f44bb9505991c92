"""Traces: what was heard in one world, and the story of all worlds of one program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge
from operator import attrgetter
from typing import TypeVar, overload

from halfstep.events.vocabulary import Event, Made, Place, Ref

E = TypeVar("E", bound=Event)
F = TypeVar("F", bound=Event)
G = TypeVar("G", bound=Event)
H = TypeVar("H", bound=Event)


@dataclass(frozen=True, slots=True)
class Decision:
    """A question the source does not answer, and the answer tried in a world."""

    key: str
    answer: object
    kind: str
    """`flag`, `rank`, `device` or `data`; a `data` decision other than the usual one is an exception in the data."""
    usual: bool
    place: Place | None = None
    synced: bool = False
    """The condition was agreed between ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The events of one run in one world, in order. Two traces are the same only if they are one object."""

    events: tuple[Event, ...]
    decisions: tuple[Decision, ...] = ()
    root: str = ""
    """The function that was imagined as the start, empty for the module itself."""
    repeated: bool = False
    """The root is one step or one epoch of a loop that was not heard."""
    _kinds: dict[type[Event], list[Event]] = field(init=False, repr=False, default_factory=dict)
    _made: dict[Ref, Made] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        for event in self.events:
            self._kinds.setdefault(type(event), []).append(event)
            if isinstance(event, Made):
                self._made.setdefault(event.what, event)

    @overload
    def of(self, first: type[E], /) -> Iterator[E]: ...

    @overload
    def of(self, first: type[E], second: type[F], /) -> Iterator[E | F]: ...

    @overload
    def of(self, first: type[E], second: type[F], third: type[G], /) -> Iterator[E | F | G]: ...

    @overload
    def of(self, first: type[E], second: type[F], third: type[G], fourth: type[H], /) -> Iterator[E | F | G | H]: ...

    @overload
    def of(self, *kinds: type[Event]) -> Iterator[Event]: ...

    def of(self, *kinds: type[Event]) -> Iterator[Event]:
        """The events of these kinds, in order."""
        lists = [self._kinds[kind] for kind in kinds if kind in self._kinds]
        return iter(lists[0]) if len(lists) == 1 else merge(*lists, key=attrgetter("serial"))

    def has(self, *kinds: type[Event]) -> bool:
        """Whether any event of these kinds was heard."""
        return any(kind in self._kinds for kind in kinds)

    def made(self, ref: Ref) -> Made | None:
        """How an object came to be, if that was heard."""
        return self._made.get(ref)

    def fact(self, ref: Ref | None, name: str, default: object = None) -> object:
        """One fact about an object's construction."""
        made = self.made(ref) if ref else None
        return made.facts.get(name, default) if made else default

    @property
    def exception(self) -> Decision | None:
        """The exception in the data that this world tries, if any."""
        return next((d for d in self.decisions if d.kind == "data" and not d.usual), None)

    @property
    def rank(self) -> int | None:
        """The rank that this world imagines, if the program asked."""
        return next((int(str(d.answer)) for d in self.decisions if d.kind == "rank"), None)


@dataclass(frozen=True, slots=True)
class Fact:
    """Something seen in the resolved program that is not an event: `kind` names it."""

    kind: str
    place: Place
    detail: str = ""
    values: dict[str, object] = field(default_factory=dict, hash=False, compare=False)


@dataclass(frozen=True, slots=True)
class Story:
    """All worlds of one program and what its text says besides."""

    traces: tuple[Trace, ...] = ()
    facts: tuple[Fact, ...] = ()

    def told(self, kind: str) -> Iterator[Fact]:
        """The facts of one kind."""
        return (fact for fact in self.facts if fact.kind == kind)

    def usual(self, trace: Trace) -> Trace | None:
        """The trace of the same root in which every question had its usual answer."""
        same = (other for other in self.traces if other.root == trace.root)
        return next((other for other in same if all(d.usual for d in other.decisions)), None)
