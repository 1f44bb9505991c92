"""Which statements a window of the engine holds: those of a turn, a loop of micro-batches, or those of several turns."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from halfstep.events.vocabulary import Backward, Event, Place, Step, ZeroGrad
from halfstep.imagine.converting.outcome import NotSure
from halfstep.imagine.converting.places import Site, backward_calls, step_calls
from halfstep.imagine.converting.program import Program
from halfstep.imagine.converting.syntax import Block, bound_names, read_names

Update = tuple[list[Backward], Step]
"""The backward passes of an update, and its step."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The statements of an update.

    Attributes:
        block: they stand in it, from `first` to `last`.
        outermost: where an update takes several turns, the outermost loop around them; before it no window is open.
    """

    block: Block
    first: int
    last: int
    outermost: ast.stmt | None = None


def extent_of(program: Program, site: Site) -> Extent:
    """What a window around a site holds.

    Raises:
        NotSure: no window holds all of an update.
    """
    made = updates(program)
    nested = all(b.loops[: len(step.loops)] == step.loops for backwards, step in made for b in backwards)
    for block, index in program.syntax.blocks_up(site.statement) if nested else ():
        steps = [i for i in program.indices(block, Step) if i > index]
        if steps:
            first = site.first if block is site.block else index
            if _is_left(program, block[first : min(steps)], site):
                break
            return Extent(block, first, min(steps) - 1)
    return _over_turns(program, site, made)


def updates(program: Program) -> list[Update]:
    """Every update that was heard, but for those of loops that an exception ended."""
    found: list[Update] = []
    for trace in program.traces:
        passed: list[Backward] = []
        for event in trace.of(Backward, Step) if trace.exception is None else ():
            if isinstance(event, Backward):
                passed.append(event)
                continue
            if not passed:
                raise NotSure("the optimizer steps without a backward pass before it", _line(event.place))
            if len({(b.stack, b.loops) for b in passed}) != len(passed):
                raise NotSure("backward runs several times in one turn, by the same line", _line(passed[0].place))
            found.append((passed, event))
            passed = []
    return found


def _is_left(program: Program, statements: Block, site: Site) -> bool:
    """Whether statements are left before their end, within the function that they are in."""
    held = {node for statement in statements for node in ast.walk(statement)}
    for node in held:
        if isinstance(node, ast.Return) and program.syntax.function(node) is site.function:
            return True
        if isinstance(node, (ast.Continue, ast.Break)) and program.syntax.loop_around(node) not in held:
            return True
    return False


def _over_turns(program: Program, site: Site, made: list[Update]) -> Extent:
    loops = [b[i] for b, i in program.syntax.blocks_up(site.statement) if isinstance(b[i], (ast.For, ast.While))]
    for call in step_calls(program):
        if program.syntax.function(call) is not site.function:
            raise NotSure(
                "the optimizer steps in another function than the one that runs backward, and not each time", call.lineno
            )
    for backwards, step in made:
        life = {_call(program, site, event, len(loops)) for event in backwards}
        of_step = step.loops[: len(backwards[0].loops) - len(loops)]
        if not loops or life != {(of_step, next(iter(life))[1])} or len(life) != 1:
            raise NotSure("the micro-batches of an update come from several calls of the function that trains", _line(step.place))
    _check_clearing(program)
    return Extent(site.block, site.first, site.backward, loops[-1])


def _call(program: Program, site: Site, event: Event, depth: int) -> tuple[object, tuple[Place, ...]]:
    """Which call of the site's function an event happens in: the turns around it, and the way to it."""
    here = site.function
    outside: list[Place] = []
    for place in event.stack:
        nodes = program.syntax.nodes_at(place) if program.syntax.here(place) else []
        if here is None or (nodes and program.syntax.is_within(program.syntax.function(nodes[0]), here)):
            break
        outside.append(place)
    return event.loops[: len(event.loops) - depth], tuple(outside)


def _check_clearing(program: Program) -> None:
    """See that gradients are cleared only where a window would be empty."""
    for trace in program.traces:
        waiting = False
        for event in trace.of(Backward, Step, ZeroGrad):
            if isinstance(event, ZeroGrad) and waiting:
                raise NotSure("gradients that no step has used are cleared, which a window does not do", _line(event.place))
            waiting = isinstance(event, Backward)


def _line(place: Place | None) -> int | None:
    return place.line if place is not None else None


Quotient = ast.BinOp | ast.AugAssign


def quotients(program: Program, site: Site) -> dict[ast.Call, Quotient]:
    """Where each loss of an update is divided by the number of turns, by its backward pass; nothing where that is one.

    Raises:
        NotSure: one is not, or not where the number could be read.
    """
    made = updates(program)
    if all(_turns(backwards) == 1 for backwards, _ in made):
        return {}
    heard = [(b, _turns(backwards)) for backwards, _ in made for b in backwards]
    return {call: _quotient(program, site, call, heard) for call in backward_calls(program)}


def _quotient(program: Program, site: Site, call: ast.Call, heard: list[tuple[Backward, int]]) -> Quotient:
    own = [(b, turns) for b, turns in heard if program.syntax.call_at(b.place) is call]
    places = {d.place for b, turns in own for d in b.divisors if d.value == turns}
    nodes = [n for p in places if p is not None and program.syntax.here(p) for n in program.syntax.nodes_at(p)]
    found = [n for n in nodes if isinstance(n, (ast.BinOp, ast.AugAssign)) and isinstance(n.op, ast.Div)]
    if len(found) != 1 or len(places) != 1:
        raise NotSure(
            "the losses of an update are not divided by their number in one place of this file, and an engine takes their mean",
            call.lineno,
        )
    _check_divisor(program, site, found[0])
    return found[0]


def _turns(backwards: list[Backward]) -> int:
    return len({b.loops for b in backwards})


def divisor(node: Quotient) -> ast.expr:
    """The number that a loss is divided by."""
    return node.right if isinstance(node, ast.BinOp) else node.value


def _check_divisor(program: Program, site: Site, node: Quotient) -> None:
    """See that the number means the same where the loss is backpropagated."""
    names = read_names(divisor(node))
    between = [s for s in site.block[: site.backward + 1] if s.lineno > node.lineno]
    if program.syntax.function(node) is not site.function or any(bound_names(s) & names for s in between):
        raise NotSure("the loss is divided where the window's size has another name than at its backward pass", node.lineno)


def has_shorter(program: Program) -> bool:
    """Whether an update has fewer micro-batches than its losses are divided by."""
    return any(
        _turns(backwards) < d.value
        for backwards, _ in updates(program)
        for b in backwards
        for d in b.divisors
        if d.value is not None and "accum" in d.tags
    )
