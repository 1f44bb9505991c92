"""Follows a name from the function that uses it back to the function that made it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from itertools import pairwise

from halfstep.events.vocabulary import Event
from halfstep.imagine.converting.outcome import NotSure
from halfstep.imagine.converting.program import Program
from halfstep.imagine.converting.reach import Home
from halfstep.imagine.converting.syntax import FunctionNode


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an object that a function uses under some name comes from.

    Attributes:
        function: the function that made it (None for the module); of an attribute, the one that uses it.
        text: its name there.
        nodes: the expressions there by which it reaches its users.
        received: functions on the way that have it as a parameter, with the parameter's name.
    """

    function: FunctionNode | None
    text: str
    nodes: tuple[ast.expr, ...]
    received: tuple[tuple[FunctionNode, str], ...] = field(default=())


def origin_of(
    program: Program,
    node: ast.expr,
    event: Event,
    received: tuple[tuple[FunctionNode, str], ...] = (),
    until: FunctionNode | None = None,
) -> Origin:
    """Follow a name or attribute back through the parameters it came by, along the calls that led to an event.

    Parameters of the function `until` are followed no further.

    Raises:
        NotSure: it came another way.
    """
    function = program.syntax.function(node)
    if isinstance(node, ast.Attribute) or not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute) and ast.unparse(node).count(".") == 1:
            return Origin(function, ast.unparse(node), (node,), received)
        raise NotSure("what trains is not a name or an attribute", node.lineno)
    holder = _holder(program, node.id, function)
    if holder is None or holder is until or node.id not in _parameters(holder):
        return Origin(holder, node.id, (node,), received)
    calls = _calls_heard(program, holder, event)
    if not calls or len(received) > 8:
        raise NotSure(f"how `{node.id}` comes into `{holder.name}` cannot be seen", holder.lineno)
    arguments = [_argument(program, call, holder, node.id) for call in calls]
    origins = [origin_of(program, argument, event, (*received, (holder, node.id)), until) for argument in arguments]
    first = origins[0]
    if any((o.function, o.text) != (first.function, first.text) for o in origins):
        raise NotSure(f"`{node.id}` comes into `{holder.name}` from several places", holder.lineno)
    return Origin(first.function, first.text, tuple(n for o in origins for n in o.nodes), first.received)


def _holder(program: Program, name: str, function: FunctionNode | None) -> FunctionNode | None:
    """The function whose name it is, None for the module."""
    while function is not None:
        if name in _parameters(function) or name in _stored(program, function):
            return function
        function = program.syntax.function(function)
    return None


def _parameters(function: FunctionNode) -> set[str]:
    spec = function.args
    return {a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)}


def _stored(program: Program, function: FunctionNode) -> set[str]:
    return {
        n.id
        for n in ast.walk(function)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and program.syntax.function(n) is function
    }


def _calls_heard(program: Program, callee: FunctionNode, event: Event) -> list[ast.Call]:
    """The calls of a function on the way to an event; of a function that made the one that was called, all its calls."""
    frames = program.frames(event)
    found = [before.node for before, after in pairwise(frames) if after.function is callee and isinstance(before.node, ast.Call)]
    if found:
        return found
    return [
        n
        for n in ast.walk(program.syntax.tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == callee.name
    ]


def _argument(program: Program, call: ast.Call, callee: FunctionNode, name: str) -> ast.expr:
    keyword = next((k.value for k in call.keywords if k.arg == name), None)
    if keyword is not None:
        return keyword
    names = [a.arg for a in (*callee.args.posonlyargs, *callee.args.args)]
    position = names.index(name) - (1 if program.syntax.owner(callee) is not None else 0)
    if any(isinstance(a, ast.Starred) for a in call.args) or not 0 <= position < len(call.args):
        raise NotSure(f"`{name}` is not given to `{callee.name}` in a way that can be followed", call.lineno)
    return call.args[position]


def at_home(program: Program, node: ast.expr, event: Event, home: Home) -> str:
    """An expression near an event, as it is written where names are made that live as long as the optimizer.

    Raises:
        NotSure: it means nothing there.
    """
    renamed: list[tuple[ast.Name, str]] = []
    for name in [n for n in ast.walk(node) if isinstance(n, ast.Name)]:
        if _is_self(program, name, home):
            continue
        origin = origin_of(program, name, event, until=home.function)
        if not _is_known(program, origin, home, name):
            raise NotSure(f"`{name.id}` is not known where the engine would be made", name.lineno)
        renamed += [(name, origin.text)] if origin.text != name.id else []
    return _renamed(program, node, renamed)


def _is_self(program: Program, name: ast.Name, home: Home) -> bool:
    """Whether a name is the object that holds the optimizer."""
    function = program.syntax.function(name)
    first = function.args.args[0].arg if function is not None and function.args.args else ""
    return home.cls is not None and program.syntax.owner(function) is home.cls and name.id == first == home.prefix.rstrip(".")


def _is_known(program: Program, origin: Origin, home: Home, name: ast.Name) -> bool:
    """Whether what a name means can be read at home: it has its value already."""
    if not program.syntax.is_within(home.function, origin.function):
        return False
    if origin.function is not None and origin.text in _parameters(origin.function):
        return True
    root: ast.AST = origin.function if origin.function is not None else program.syntax.tree
    stored = [
        n.lineno for n in ast.walk(root) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id == origin.text
    ]
    if not stored or (origin.function is None and home.function is not None):
        return True
    return min(stored) <= home.statement.lineno


def _renamed(program: Program, node: ast.expr, renamed: list[tuple[ast.Name, str]]) -> str:
    text = program.syntax.text(node)
    if not renamed:
        return text
    if "\n" in text:
        raise NotSure("what the engine needs is written over several lines, in other names", node.lineno)
    raw, start = text.encode(), node.col_offset
    for name, other in sorted(renamed, key=lambda r: -r[0].col_offset):
        at = name.col_offset - start
        raw = raw[:at] + other.encode() + raw[at + len(name.id.encode()) :]
    return raw.decode()
