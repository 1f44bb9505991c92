"""Worlds: answers to what the source does not say, tried one by one within a bound."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from halfstep.events.trace import Decision
from halfstep.events.vocabulary import Place

MAX_WORLDS = 16
"""Worlds tried for one start of one program."""

PRIORITY = {"rank": 0, "flag": 1, "device": 2, "data": 3}


@dataclass(slots=True)
class World:
    """The answers of one run: those it was given, and the usual one for whatever else is asked."""

    given: dict[str, int] = field(default_factory=dict)
    asked: dict[str, tuple[Decision, int, int]] = field(default_factory=dict)

    def choose(
        self, key: str, options: tuple[object, ...], usual: int, kind: str, place: Place | None, synced: bool = False
    ) -> object:
        """The answer to a question in this world; the same question has one answer."""
        index = self.given.get(key, usual)
        answer = options[index] if index < len(options) else options[usual]
        if key not in self.asked:
            decision = Decision(key, answer, kind, index == usual, place, synced)
            self.asked[key] = (decision, len(options), usual)
        return answer

    def move(self, key: str, place: Place) -> None:
        """The answer is acted on at another place than where it was asked for."""
        decision, count, usual = self.asked[key]
        self.asked[key] = (replace(decision, place=place), count, usual)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Every answer that was given, in the order of asking."""
        return tuple(decision for decision, _, _ in self.asked.values())


class Exploration:
    """Hands out worlds: the usual one first, then those that differ from it in one answer, then in two."""

    def __init__(self, limit: int = MAX_WORLDS) -> None:
        self._todo: deque[dict[str, int]] = deque([{}])
        self._seen: set[frozenset[tuple[str, int]]] = set()
        self._left = limit

    def worlds(self) -> Iterator[World]:
        """Worlds still to be tried; call `learn` with each after its run."""
        while self._todo and self._left > 0:
            given = self._todo.popleft()
            if frozenset(given.items()) in self._seen:
                continue
            self._seen.add(frozenset(given.items()))
            self._left -= 1
            yield World(given)

    def learn(self, world: World) -> None:
        """Queue the worlds that differ from this one in one more answer."""
        if len(world.given) >= 3:
            return
        asked = sorted(world.asked.items(), key=lambda item: PRIORITY.get(item[1][0].kind, 9))
        for key, (_, count, usual) in asked:
            if key in world.given:
                continue
            for index in range(count):
                if index != usual:
                    self._todo.append({**world.given, key: index})
