"""A program as it was heard: the traces of the start that trains, and where in this file their events happen."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from halfstep.events.trace import Trace
from halfstep.events.vocabulary import Backward, Event, Forward, Loss, Made, Place, Step
from halfstep.imagine.converting.outcome import NotSure
from halfstep.imagine.converting.syntax import DEFINITIONS, Block, FunctionNode, Syntax, end_line, first_line
from halfstep.imagine.project import parse
from halfstep.imagine.story import tell

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class Frame:
    """One function on the way to an event: where in it the way goes on."""

    function: FunctionNode | None
    node: ast.AST
    statement: ast.stmt


class Program:
    """One file, what was heard of it, and the start whose loop trains."""

    def __init__(self, source: str, path: str) -> None:
        tree = parse(source)
        if tree is None:
            raise NotSure("the file is not Python that can be read")
        self.syntax = Syntax(source, tree, path)
        story = tell(tree, path)
        roots = list(dict.fromkeys(t.root for t in story.traces if t.has(Backward) and t.has(Step)))
        if not roots:
            raise NotSure("no training loop was heard in it: nothing calls `backward` and then an optimizer's `step`")
        self.traces = tuple(t for t in story.traces if t.root == roots[0])
        self.others = tuple(t for t in story.traces if t.root in roots[1:])
        """Traces of further starts that train, which are left."""

    @property
    def usual(self) -> Trace:
        """The trace in which every question has its usual answer, as far as it was heard and trains."""
        trained = [t for t in self.traces if t.has(Backward) and t.has(Step)]
        return min(trained, key=lambda t: sum(not d.usual for d in t.decisions))

    def all(self, *kinds: type[E]) -> Iterator[E]:
        """The events of these kinds in all worlds."""
        for trace in self.traces:
            yield from (event for event in trace.events if isinstance(event, kinds))

    def made(self, kind: str) -> dict[Place, Made]:
        """Where objects of this kind are made, in all worlds."""
        return {e.place: e for e in self.all(Made) if e.what.kind == kind and e.place is not None}

    def frames(self, event: Event) -> list[Frame]:
        """The functions of this file on the way to an event, outermost first; ends where the way leaves the file."""
        found: list[Frame] = []
        for place in event.stack:
            nodes = self.syntax.nodes_at(place) if self.syntax.here(place) else []
            if nodes:
                node = next((n for n in nodes if isinstance(n, ast.Call)), nodes[0])
                found.append(Frame(self.syntax.function(node), node, self.syntax.statement(node)))
            elif found:
                break
        return found

    def index_in(self, block: Block, event: Event) -> int | None:
        """Which statement of a block an event happens in."""
        for place in event.stack:
            if not self.syntax.here(place):
                continue
            for index, statement in enumerate(block):
                if not isinstance(statement, DEFINITIONS) and first_line(statement) <= place.line <= end_line(statement):
                    return index
        return None

    def indices(self, block: Block, *kinds: type[Event], grad: bool = False) -> set[int]:
        """The statements of a block in which events of these kinds happen in any world."""
        found: set[int] = set()
        seen: set[tuple[Place, ...]] = set()
        for event in self.all(*kinds):
            if event.stack in seen or (grad and isinstance(event, Forward) and not event.grad_enabled):
                continue
            seen.add(event.stack)
            index = self.index_in(block, event)
            if index is not None:
                found.add(index)
        return found

    def losses(self) -> Iterator[tuple[Trace, Backward, list[Event]]]:
        """Each backward pass with the forward passes and criteria between it and the one before."""
        for trace in self.traces:
            heard: list[Event] = []
            for event in trace.of(Forward, Loss, Backward):
                if isinstance(event, Backward):
                    yield trace, event, heard
                    heard = []
                elif isinstance(event, Loss) or (isinstance(event, Forward) and event.grad_enabled):
                    heard.append(event)
