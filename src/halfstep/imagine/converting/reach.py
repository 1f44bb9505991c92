"""New names where they are needed: made where the optimizer is made, and handed to the functions that use them."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from halfstep.events.vocabulary import Event, Step
from halfstep.imagine.converting.outcome import NotSure
from halfstep.imagine.converting.patch import Patch
from halfstep.imagine.converting.program import Frame, Program
from halfstep.imagine.converting.syntax import FunctionNode


@dataclass(frozen=True, slots=True)
class Home:
    """Where names can be made that live as long as the optimizer.

    Attributes:
        function: the function that it stands in.
        statement: they are made after this one, or before it where `early`.
        prefix: `self.` where they are attributes.
    """

    function: FunctionNode | None
    statement: ast.stmt
    early: bool = False
    prefix: str = ""
    cls: ast.ClassDef | None = None
    subject: str = ""
    """The optimizer, as the function that steps it writes it."""

    def put(self, patch: Patch, *lines: str) -> None:
        """Make the names there."""
        if self.early:
            patch.before(self.statement, *lines)
        else:
            patch.after(self.statement, *lines)


def home_of(program: Program) -> Home:
    """Where the optimizer of the loop begins to live.

    Raises:
        NotSure: it is not made in a place of this file from which the loop can be followed.
    """
    step = next(program.usual.of(Step))
    frames = program.frames(step)
    if not frames:
        raise NotSure("the optimizer steps outside of this file")
    call = program.syntax.call_at(step.place)
    receiver = call.func.value if call is not None and isinstance(call.func, ast.Attribute) else None
    subject = program.syntax.text(receiver) if receiver is not None else ""
    owner = program.syntax.owner(frames[-1].function)
    if owner is not None and isinstance(receiver, ast.Attribute) and ast.unparse(receiver.value) == _first_parameter(frames[-1]):
        return _attribute(program, owner, receiver.attr, subject)
    made = program.usual.made(step.optimizer)
    if made is None:
        return _given(program, step, frames, subject)
    return _local(program, made, frames, subject)


def _first_parameter(frame: Frame) -> str:
    args = frame.function.args.args if frame.function is not None else []
    return args[0].arg if args else ""


def _attribute(program: Program, owner: ast.ClassDef, name: str, subject: str) -> Home:
    """The one place where a class is given its optimizer."""
    found = [
        node
        for node in ast.walk(owner)
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Attribute) and ast.unparse(t) == f"self.{name}" for t in node.targets)
    ]
    if len(found) != 1:
        raise NotSure(f"`self.{name}` is set in {len(found) or 'no'} places, so no one place makes what lives as long")
    function = program.syntax.function(found[0])
    return Home(function, found[0], prefix="self.", cls=owner, subject=subject)


def _given(program: Program, step: Step, frames: list[Frame], subject: str) -> Home:
    """An optimizer from outside: its life is the call of the function that trains, if that holds every epoch."""
    if program.usual.repeated or len(step.loops) < 2:
        raise NotSure(
            "the optimizer is made outside of this file, and so must be what lives as long; `--precision bf16` needs nothing"
        )
    for block, index in program.syntax.blocks_up(frames[0].statement):
        outermost = Home(frames[0].function, block[index], early=True, subject=subject)
    return outermost


def _local(program: Program, made: Event, frames: list[Frame], subject: str) -> Home:
    """The statement that makes the optimizer, in the innermost function that also leads to its step."""
    for making in reversed(program.frames(made)):
        for frame in frames:
            if frame.function is not making.function:
                continue
            for block, index in program.syntax.blocks_up(making.statement):
                other = next((i for b, i in program.syntax.blocks_up(frame.statement) if b is block), None)
                if other is not None and other != index:
                    return Home(making.function, block[index], subject=subject)
    raise NotSure("the optimizer is made where the loop cannot be seen, so nothing can be made beside it")


class Carrier:
    """Hands new names from their home to the functions that need them."""

    def __init__(self, program: Program, patch: Patch, home: Home, names: tuple[str, ...]) -> None:
        self.program, self.patch, self.home, self.names = program, patch, home, names
        self._hops: dict[ast.Call, FunctionNode] = {}

    def reach(self, event: Event) -> None:
        """Make the names readable where an event happens.

        Raises:
            NotSure: the way there cannot be followed.
        """
        frames = self.program.frames(event)
        if self.home.cls is not None:
            self._check_owner(frames)
            return
        start = next((i for i, f in enumerate(frames) if f.function is self.home.function), None)
        if start is None:
            line = frames[-1].statement.lineno if frames else None
            raise NotSure(f"`{self.names[-1]}` cannot be handed to a function that needs it", line)
        for frame, after in zip(frames[start:], frames[start + 1 :], strict=False):
            if not self._sees(after.function):
                self._hop(frame, after)

    def _check_owner(self, frames: list[Frame]) -> None:
        function = frames[-1].function if frames else None
        while function is not None and self.program.syntax.owner(function) is not self.home.cls:
            function = self.program.syntax.function(function)
        if function is None:
            raise NotSure(f"`{self.names[-1]}` belongs to an object that a function outside of its class would need")

    def _sees(self, function: FunctionNode | None) -> bool:
        """Whether a function reads names of the home without being given them."""
        if self.home.function is not None:
            return self.program.syntax.is_within(function, self.home.function)
        base = self.home.subject.split(".")[0]
        while function is not None:
            args = function.args
            if base in {a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)}:
                return False
            function = self.program.syntax.function(function)
        return True

    def _hop(self, frame: Frame, after: Frame) -> None:
        call, callee = frame.node, after.function
        factory = self._factory(callee)
        if factory is not None:
            self._hop_to_factory(factory)
        elif isinstance(call, ast.Call) and callee is not None and self._is_call_of(call, callee):
            self._hops[call] = callee
        else:
            raise NotSure(
                f"a function that trains is called in a way that cannot take `{self.names[-1]}`", frame.statement.lineno
            )

    def _factory(self, callee: FunctionNode | None) -> FunctionNode | None:
        """The outermost function in which another is defined, whose names it reads."""
        outer = self.program.syntax.function(callee) if callee is not None else None
        while outer is not None and self.program.syntax.function(outer) is not None:
            outer = self.program.syntax.function(outer)
        return outer

    def _hop_to_factory(self, factory: FunctionNode) -> None:
        """A function that makes the one that trains is given the names; it must be called where they are."""
        for call in self._calls_of(factory):
            if not self.program.syntax.is_within(self.program.syntax.function(call), self.home.function):
                raise NotSure(f"`{factory.name}` is called where `{self.names[-1]}` is not at hand", call.lineno)
            self._hops[call] = factory

    def _calls_of(self, callee: FunctionNode) -> list[ast.Call]:
        return [n for n in ast.walk(self.program.syntax.tree) if isinstance(n, ast.Call) and self._is_call_of(n, callee)]

    def _is_call_of(self, call: ast.Call, callee: FunctionNode) -> bool:
        func = call.func
        if self.program.syntax.owner(callee) is not None:
            return isinstance(func, ast.Attribute) and func.attr == callee.name
        return isinstance(func, ast.Name) and func.id == callee.name

    def finish(self) -> None:
        """Write the parameters and arguments.

        Raises:
            NotSure: a function is called from more places than were heard.
        """
        for callee in dict.fromkeys(self._hops.values()):
            others = [call for call in self._calls_of(callee) if call not in self._hops]
            if others:
                raise NotSure(f"`{callee.name}` is called here too, where `{self.names[-1]}` is not at hand", others[0].lineno)
            add_parameters(self.patch, callee, self.names)
        for call in self._hops:
            add_arguments(self.patch, call, ", ".join(f"{name}={name}" for name in self.names))


def add_arguments(patch: Patch, call: ast.Call, text: str) -> None:
    """Give a call more arguments, after those it has; on a line of their own where the last has its own.

    Raises:
        NotSure: its only argument is a generator without parentheses.
    """
    given: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    _, end = patch.span(call)
    if not given:
        patch.put(end - 1, end - 1, text)
        return
    if len(given) == 1 and isinstance(given[0], ast.GeneratorExp):
        raise NotSure("a generator is the only argument of a call that needs another", call.lineno)
    last = max(given, key=lambda node: patch.span(node)[1])
    at = patch.span(last)[1]
    line, column = patch.syntax.lines[(last.end_lineno or 1) - 1], last.end_col_offset or 0
    while line[column : column + 1] == b")" and at < end - 1:  # the argument stands in parentheses of its own
        column, at = column + 1, at + 1
    before = patch.syntax.lines[last.lineno - 1][: last.col_offset].decode()
    indent = before.rstrip("(")
    patch.put(at, at, f", {text}" if indent.strip() or last.lineno == call.lineno else f",\n{indent}{text}")


def add_parameters(patch: Patch, function: FunctionNode, names: tuple[str, ...]) -> None:
    """Give a function more parameters without defaults, which are given by name."""
    spec = function.args
    text = ", ".join(names)
    if spec.kwarg is not None:
        start, _ = patch.span(spec.kwarg)
        patch.put(start - 2, start - 2, f"{text}, " if spec.kwonlyargs or spec.vararg or not spec.defaults else f"*, {text}, ")
        return
    nodes = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *spec.defaults, *(d for d in spec.kw_defaults if d is not None)]
    nodes += [spec.vararg] if spec.vararg is not None else []
    if not nodes:
        raise NotSure(f"`{function.name}` takes no arguments", function.lineno)
    end = max(patch.span(node)[1] for node in nodes)
    needs_star = bool(spec.defaults) and not spec.kwonlyargs and spec.vararg is None
    patch.put(end, end, f", *, {text}" if needs_star else f", {text}")
