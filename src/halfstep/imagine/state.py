"""What a run in one world carries along: where it is, what is open around it, and what was heard so far."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from halfstep.events.vocabulary import AverageUpdate, Backward, Event, Made, Place, Region, Turn
from halfstep.imagine.values import (
    NO_TAGS,
    Class,
    Items,
    Module,
    Scope,
    Stream,
    Tags,
    Tensor,
    Thing,
    Truth,
    Unknown,
    Value,
    tags_of,
)
from halfstep.imagine.worlds import World

if TYPE_CHECKING:
    from halfstep.imagine.project import Project

MICRO_BATCHES = 9
ACCUMULATION = 4
WHOLE_WINDOWS = 24
"""Long counts are shortened by whole multiples of this, so that windows of 2, 3, 4, 6, 8 and 12 keep their phase."""
LONG_LOOP, LONG_TURN = 6_000, 600
"""Steps after which a loop with turns as long as this goes on with its last turn: it holds loops of its own."""
MAX_DEPTH = 30
MAX_EVENTS = 12_000


class Signal(Exception):
    """Control flow of the imagined program."""


class BreakLoop(Signal):
    """`break`."""


class ContinueLoop(Signal):
    """`continue`."""


class ReturnValue(Signal):
    """`return`, with its value."""

    def __init__(self, value: Value) -> None:
        self.value = value


class Raised(Signal):
    """`raise`."""


class Stopped(Raised):
    """The end of an iterator."""


class Exited(Raised):
    """The end of the process, as it was meant: what was heard so far is whole."""


class OutOfBudget(Exception):
    """The program is too long to be imagined."""


class Restart(Exception):
    """Something was learned (of the length of loaders) that holds from the start."""

    def __init__(self, micro_batches: int, phase: int = WHOLE_WINDOWS) -> None:
        self.micro_batches = micro_batches
        self.phase = phase


@dataclass(slots=True)
class Draft:
    """An event before the objects it concerns are all known."""

    kind: type[Event]
    fields: dict[str, Value]


@dataclass(slots=True)
class Reach:
    """Optimizers to be found at the end: those that hold parameters of these models."""

    models: frozenset[Thing]


@dataclass(slots=True)
class Budget:
    """Steps left for one file."""

    steps: int = 400_000


@dataclass
class State:
    """The state of a run."""

    project: Project
    world: World
    budget: Budget
    micro_batches: int = MICRO_BATCHES
    phase: int = WHOLE_WINDOWS
    shortened: bool = False
    turns_here: int = 0
    drafts: list[Draft] = field(default_factory=list)
    things: list[Thing] = field(default_factory=list)
    loops: list[Turn] = field(default_factory=list)
    guards: list[Tags] = field(default_factory=list)
    stack: list[Place] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    entries: list[int] = field(default_factory=lambda: [0])
    """How many loops were running when each function was entered."""
    regions: list[Region] = field(default_factory=list)
    grad: list[bool] = field(default_factory=lambda: [True])
    no_sync: list[Thing | None] = field(default_factory=list)
    forwards: int = 0
    in_worker: bool = False
    catching: int = 0
    """How many `try` around wait for the end of an iterator."""
    counters: dict[str, int] = field(default_factory=dict)
    yields: list[Callable[[Value], Value] | None] = field(default_factory=lambda: [None])
    largest_window: int = 0
    window_is_sure: bool = False
    entered: set[int] = field(default_factory=set)
    scope: Scope = field(default_factory=lambda: Scope({}))
    module: Module = field(default_factory=lambda: Module("", "", ast.Module([], [])))
    memo: dict[object, Value] = field(default_factory=dict)

    # --- to be provided by the interpreter ---

    def eval(self, node: ast.expr) -> Value:
        """The value of an expression."""
        raise NotImplementedError

    def run(self, body: list[ast.stmt]) -> None:
        """Run statements."""
        raise NotImplementedError

    def call(self, func: Value, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
        """Call a value."""
        raise NotImplementedError

    def getattr(self, value: Value, name: str, node: ast.AST) -> Value:
        """An attribute of a value."""
        raise NotImplementedError

    def truth(self, value: Value, node: ast.AST) -> bool:
        """Whether a value is true in this world."""
        raise NotImplementedError

    def compare_pair(self, left: Value, op: ast.cmpop, right: Value, node: ast.Compare) -> Value:
        """One comparison."""
        raise NotImplementedError

    def items(self, source: Value, node: ast.AST, body: list[ast.stmt] | None = None) -> Items:
        """What a loop over `source` runs over."""
        raise NotImplementedError

    def setattr(self, value: Value, name: str, new: Value, node: ast.AST) -> None:
        """Set an attribute of a value."""
        raise NotImplementedError

    def setitem(self, value: Value, key: Value, new: Value, node: ast.AST) -> None:
        """Set an item of a value."""
        raise NotImplementedError

    def take_in(self, container: Value, key: str, new: Value, node: ast.AST) -> None:
        """A module is put into a list or dict that a model holds."""
        raise NotImplementedError

    def resume(self, stream: Stream, receive: Callable[[Value], Value], node: ast.AST | None = None) -> None:
        """Run a generator for a node, handing what it yields to `receive`."""
        raise NotImplementedError

    def first_of(self, stream: Stream) -> Value:
        """The next value that a generator yields."""
        raise NotImplementedError

    # --- places and events ---

    def place(self, node: ast.AST) -> Place:
        """Where a node stands."""
        return Place(
            self.module.path,
            getattr(node, "lineno", 1),
            getattr(node, "col_offset", 0),
            getattr(node, "end_lineno", None) or 0,
            getattr(node, "end_col_offset", None) or 0,
        )

    def outside(self, classes: list[Class], node: ast.AST) -> Place:
        """Where the program enters an object: the innermost call that does not stand in one of these classes."""
        places = [self.place(node), *reversed(self.stack)]
        spans = [(cls.node.lineno, cls.node.end_lineno or 0) for cls in classes]
        return next((p for p in places if not any(first <= p.line <= last for first, last in spans)), places[0])

    def emit(self, kind: type[Event], node: ast.AST, /, **fields: Value) -> None:
        """Say that something happened at a node."""
        if self.in_worker and not fields.get("in_worker"):
            return
        if len(self.drafts) > MAX_EVENTS:
            raise OutOfBudget
        place = self.place(node)
        fields.update(
            place=fields.get("place", place),
            stack=(*self.stack, place),
            loops=tuple(self.loops),
            guards=self.guard,
        )
        self.drafts.append(Draft(kind, fields))

    def make(self, kind: str, node: ast.AST | None, /, *, name: str = "", given: bool = False, **facts: Value) -> Thing:
        """A new object of a library; its construction is an event unless it was given from outside."""
        self.counters["thing"] = self.counters.get("thing", 0) + 1
        place = self.place(node) if node is not None else None
        thing = Thing(kind, self.counters["thing"], name, place, given, facts=facts)
        self.things.append(thing)
        self.number(kind)
        if node is not None and kind not in QUIET_KINDS:
            self.emit(Made, node, what=thing, facts=facts)
        return thing

    def shard(self, tags: Tags, node: ast.AST) -> Unknown:
        """What a rank gets when items are dealt out one by one, until it is cut to a length that all ranks have."""
        made = Unknown("shard", tags | {"rank", "strided"})
        self.memo["shard", id(made)], self.memo["alive", id(made)] = self.make("strided shard", node), made
        return made

    def forget(self, thing: Thing) -> None:
        """An object stands for another one that was heard too."""
        self.things.remove(thing)
        self.drafts = [draft for draft in self.drafts if draft.fields.get("what") is not thing]

    def share_out(self, drawn: Value, key: Value) -> None:
        """Ranks that take different parts of the same random numbers drew them alike on purpose."""
        marks = tags_of(drawn) if "rank" in tags_of(key) else NO_TAGS
        shared = [id(self.memo[mark]) for mark in marks if mark.startswith("draw ")]
        self.drafts = [draft for draft in self.drafts if id(draft) not in shared]

    def say_averaged(self, node: ast.AST) -> None:
        """Copies of weights are moved: an average that the program keeps itself."""
        if "averaged weights" not in self.memo:
            self.memo["averaged weights"] = self.make("average", None, name="weights")
        self.emit(AverageUpdate, node, target=self.memo["averaged weights"])

    def number(self, name: str) -> int:
        """The next number of a series."""
        self.counters[name] = self.counters.get(name, 0) + 1
        return self.counters[name]

    # --- what is open around ---

    @property
    def region(self) -> Region | None:
        """The innermost autocast region if it is on."""
        return self.regions[-1] if self.regions and self.regions[-1].enabled else None

    @property
    def guard(self) -> Tags:
        """What the conditions around depend on."""
        return frozenset().union(*self.guards) if self.guards else NO_TAGS

    @property
    def grad_enabled(self) -> bool:
        """Whether graphs are recorded."""
        return self.grad[-1]

    @contextmanager
    def guarded(self, tags: Tags) -> Iterator[None]:
        """Within a branch whose condition depends on `tags`."""
        if not tags:
            yield
            return
        self.guards.append(tags | {f"rank@{len(self.stack)}"} if "rank" in tags else tags)
        try:
            yield
        finally:
            self.guards.pop()

    # --- questions ---

    def flag(self, name: str, usual: bool, node: ast.AST, kind: str = "flag") -> bool:
        """The answer to a yes-or-no question in this world."""
        return bool(self.world.choose(name, (True, False), 0 if usual else 1, kind, self.place(node)))

    def rank(self, node: ast.AST) -> int:
        """The rank that this world imagines."""
        return int(str(self.world.choose("rank", (0, 1), 0, "rank", self.place(node))))

    def on_data(self, name: str, normal: bool, node: ast.AST, synced: bool) -> bool:
        """A condition on data: usually `normal`; in one world the exception, once at the end of the first window."""
        place = self.place(node)
        key = f"{place.path}:{place.line}: {name}"
        exception = self.world.choose(key, (False, True), 0, "data", place, synced)
        if not exception or not self._fires():
            return normal
        self.memo["fired"] = (key, self.loops[-1:], len(self.stack))
        return not normal

    def _fires(self) -> bool:
        """Whether an exception in the data happens now: in a loop over micro-batches only once, else always."""
        if not self.loops:
            return True
        last = next((d for d in reversed(self.drafts) if d.kind is Backward), None)
        inner = last.fields["loops"][-1].loop if last is not None and last.fields["loops"] else None
        turn = next((turn for turn in self.loops if turn.loop == inner), self.loops[-1])
        if turn.over == "loader" or turn.index == 0 or inner == turn.loop:
            return turn.index == max(2, self.largest_window) - 1
        return True

    def note_window(self, modulus: Value, tags: Tags) -> None:
        """A loop counts in steps of `modulus`: remember the likely length of the accumulation window."""
        if isinstance(modulus, int) and 1 < modulus <= (32 if "accum" in tags else 8) and "index" in tags:
            if "accum" in tags or not self.window_is_sure:
                self.largest_window = int(modulus)
            self.window_is_sure |= "accum" in tags

    def batches_of(self, loader: Thing) -> int:
        """How many micro-batches a loader yields here: as many as the program says, shortened by whole windows if many."""
        length = loader.facts.get("length")
        if not isinstance(length, int):
            return self.micro_batches
        if length < 2 * self.phase:
            return length
        self.shortened = True
        return self.phase + length % self.phase

    def spend(self) -> None:
        """Use one step of the budget."""
        self.budget.steps -= 1
        if self.budget.steps < 0:
            raise OutOfBudget

    def is_long(self, spent: int, turns: int) -> bool:
        """Whether a loop has taken so many steps in so few turns that the rest of them is left out."""
        return spent > LONG_LOOP and spent > turns * LONG_TURN

    def promote(self, value: Unknown, kind: str) -> Thing | Tensor:
        """An unknown value has shown by its use what it is."""
        if value.thing is None:
            if kind == "tensor":
                value.thing = Tensor(grad=False, tags=value.tags, loaders=value.loaders, name=value.name)
            else:
                thing = self.make(kind, None, name=value.name, given=True, tags=value.tags)
                thing.training = None
                if value.owner is not None:
                    thing.parents.append(value.owner)
                for part in (c for c in value.children.values() if isinstance(c, Unknown) and kind == "model"):
                    part.owner = thing
                    if isinstance(part.thing, Thing) and part.thing.kind == "model":
                        part.thing.parents.append(thing)
                value.thing = thing
        assert isinstance(value.thing, (Thing, Tensor))
        return value.thing

    def unwrap_truth(self, value: Value) -> Value:
        """A plain bool for a tagged one."""
        return value.value if isinstance(value, Truth) else value


QUIET_KINDS = {"context", "params", "param", "state", "layer", "stack", "device", "window"}
