"""The loop over micro-batches: what it runs over, how it counts, and how long it is, in the program's own words."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from halfstep.events.vocabulary import Backward, EpochBegin, Made, Place
from halfstep.imagine.converting.outcome import NotSure
from halfstep.imagine.converting.program import Program
from halfstep.imagine.converting.syntax import FunctionNode


@dataclass(frozen=True, slots=True)
class BatchLoop:
    """A `for` loop whose turns are micro-batches.

    Attributes:
        length: an expression for the number of turns.
        index: the name that counts the turns, None where the loop has none yet.
        start: what the index is in the first turn.
        source: the loader, as it is written in the head of the loop; None for a loop that only counts.
    """

    function: FunctionNode | None
    node: ast.For
    length: str
    index: str | None
    start: int
    source: ast.expr | None


def batch_source(program: Program) -> ast.expr | None:
    """The loader as the loop over micro-batches writes it, also where that loop is a comprehension.

    Raises:
        NotSure: there is no such loop.
    """
    place = _only_place(program)
    nodes = program.syntax.nodes_at(place) if place is not None and program.syntax.here(place) else []
    names = [n for n in nodes if isinstance(n, (ast.Name, ast.Attribute))]
    return names[0] if names else batch_loop(program).source


def _only_place(program: Program) -> Place | None:
    found = {_place_of_loop(b) for b in program.all(Backward)}
    if len(found) != 1:
        raise NotSure(f"{len(found)} loops run over batches")
    return found.pop()


def batch_loop(program: Program) -> BatchLoop:
    """The loop over micro-batches around the backward pass.

    Raises:
        NotSure: there is none whose length is known when it begins.
    """
    place = _only_place(program)
    nodes = program.syntax.nodes_at(place) if place is not None and program.syntax.here(place) else []
    node = next((n for n in nodes if isinstance(n, ast.For)), None)
    if node is None:
        line = place.line if place is not None else None
        raise NotSure("batches are not taken by a `for` loop whose length is known when it begins", line)
    return _described(program, node)


def _place_of_loop(backward: Backward) -> Place | None:
    for turn in reversed(backward.loops):
        if turn.over in ("loader", "while") or (turn.over == "count" and "epochs" not in turn.tags):
            return turn.place
        if turn.over in ("items", "endless"):
            return None
    return None


def _described(program: Program, node: ast.For) -> BatchLoop:
    function = program.syntax.function(node)
    iterable, index, start = node.iter, None, 0
    if _is_call(iterable, "range"):
        return _counting(program, node, function)
    if _is_call(iterable, "enumerate"):
        assert isinstance(iterable, ast.Call)
        start = _start(iterable)
        if isinstance(node.target, ast.Tuple) and isinstance(node.target.elts[0], ast.Name):
            index = node.target.elts[0].id
        iterable = iterable.args[0]
        if index is None:
            raise NotSure("the batches are enumerated without a name for their number", node.lineno)
    loaders = [e.loader for e in program.all(EpochBegin) if e.place is not None and e.place.line == node.lineno]
    made = [m for m in map(program.usual.made, loaders) if m is not None]
    if any(m.facts.get("iterable") and m.facts.get("length") is None for m in made):
        raise NotSure("the batches come from a stream, whose length nobody knows when an epoch begins", node.lineno)
    source = _source(program, iterable, {loader.name for loader in loaders})
    if source is None:
        raise NotSure("what the loop over batches runs over has no length that can be written", node.lineno)
    return BatchLoop(function, node, f"len({program.syntax.text(source)})", index, start, source)


def _counting(program: Program, node: ast.For, function: FunctionNode | None) -> BatchLoop:
    assert isinstance(node.iter, ast.Call)
    if len(node.iter.args) != 1 or not isinstance(node.target, ast.Name):
        raise NotSure("the loop over batches counts from another number than 0", node.lineno)
    text = program.syntax.text(node.iter.args[0])
    simple = isinstance(node.iter.args[0], (ast.Name, ast.Attribute, ast.Constant, ast.Call))
    return BatchLoop(function, node, text if simple else f"({text})", node.target.id, 0, None)


def _is_call(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name and bool(node.args)


def _start(call: ast.Call) -> int:
    given = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "start")]
    if not given:
        return 0
    if isinstance(given[0], ast.Constant) and isinstance(given[0].value, int):
        return given[0].value
    raise NotSure("the batches are enumerated from a number that is not written there", call.lineno)


def _source(program: Program, iterable: ast.expr, names: set[str]) -> ast.expr | None:
    """The loader in the head of a loop: the iterable itself, or what a progress bar or the like was given."""
    made = {e.place for e in program.all(Made) if e.what.kind == "loader"}
    if isinstance(iterable, (ast.Name, ast.Attribute)) or any(program.syntax.call_at(place) is iterable for place in made):
        return iterable
    if isinstance(iterable, ast.Call):
        inner = [a for a in iterable.args if isinstance(a, (ast.Name, ast.Attribute))]
        matching = [a for a in inner if ast.unparse(a).rsplit(".", 1)[-1] in names]
        return matching[0] if len(matching) == 1 else inner[0] if len(inner) == 1 and len(iterable.args) == 1 else None
    return None
