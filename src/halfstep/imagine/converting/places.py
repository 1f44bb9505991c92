"""Where forward and backward meet: the block that holds both, and the runs of statements that make the loss."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from halfstep.events.vocabulary import Backward, Clip, Event, Forward, Loss, SchedulerStep, Step
from halfstep.imagine.converting.outcome import NotSure
from halfstep.imagine.converting.program import Program
from halfstep.imagine.converting.syntax import Block, FunctionNode, bound_names, read_names


@dataclass(frozen=True, slots=True)
class Site:
    """A block in which a loss is made and then backpropagated."""

    function: FunctionNode | None
    block: Block
    first: int
    """The first statement of a forward pass."""
    backward: int
    """The last statement with a backward pass."""

    @property
    def statement(self) -> ast.stmt:
        """The statement of the backward pass."""
        return self.block[self.backward]


def sites(program: Program) -> list[Site]:
    """Every place where forward passes meet a backward pass, one for each block.

    Raises:
        NotSure: they do not meet in a block of this file.
    """
    found: dict[int, Site] = {}
    seen: set[tuple[object, ...]] = set()
    for _, backward, heard in program.losses():
        key = (backward.stack, tuple(e.stack for e in heard))
        if key in seen:
            continue
        seen.add(key)
        site = _meeting(program, backward, heard)
        known = found.get(id(site.block))
        if known is not None:
            site = Site(site.function, site.block, min(site.first, known.first), max(site.backward, known.backward))
        found[id(site.block)] = site
    return list(found.values())


def _meeting(program: Program, backward: Backward, heard: list[Event]) -> Site:
    forwards = _of_same_turn(backward, heard)
    for frame in reversed(program.frames(backward)):
        for block, index in program.syntax.blocks_up(frame.statement):
            where = [program.index_in(block, event) for event in forwards]
            if all(i is not None and i <= index for i in where):
                return Site(frame.function, block, min([index, *(i for i in where if i is not None)]), index)
    raise NotSure(_elsewhere(program, backward))


def _of_same_turn(backward: Backward, heard: list[Event]) -> list[Event]:
    """What was heard in the turn of the backward pass, or anywhere if the turn heard nothing."""
    depth = len(backward.loops)
    same = [e for e in heard if e.loops[:depth] == backward.loops]
    return same or [e for e in heard if isinstance(e, Forward)]


def _elsewhere(program: Program, backward: Backward) -> str:
    place = backward.place
    if place is not None and not program.syntax.here(place):
        return f"the loss is backpropagated in {place.path}, line {place.line}: convert that file"
    return "the forward pass and its backward pass do not meet in one block of this file"


def runs(program: Program, site: Site) -> list[tuple[int, int]]:
    """The runs of statements that make the losses of a site: what belongs under autocast, first and last of each."""
    block = site.block
    barriers = program.indices(block, Backward, Clip, Step, SchedulerStep)
    heard = program.indices(block, Forward, Loss, grad=True)
    inside = {i for i in heard if i not in barriers or inline_loss(site, i) is not None} | _sliced(site, barriers)
    found: list[tuple[int, int]] = []
    for index in sorted(i for i in inside if site.first <= i <= site.backward):
        if found and index not in barriers and not any(found[-1][1] <= b < index for b in barriers):
            found[-1] = (found[-1][0], index)
        else:
            found.append((index, index))
    return found


def _sliced(site: Site, barriers: set[int]) -> set[int]:
    """The statements from the first forward pass on that the losses depend on, by name."""
    needed: set[str] = set()
    found: set[int] = set()
    for index in range(site.backward, site.first - 1, -1):
        statement = site.block[index]
        if index in barriers:
            needed |= _loss_names(statement)
        elif bound_names(statement) & needed:
            found.add(index)
            needed |= read_names(statement)
    return found


def _loss_names(statement: ast.stmt) -> set[str]:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return set()
    call = statement.value
    if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
        return read_names(call.func.value)
    return set().union(*(read_names(a) for a in [*call.args, *(k.value for k in call.keywords)]))


def inline_loss(site: Site, index: int) -> ast.expr | None:
    """The expression of a loss that is made in the statement that backpropagates it, else None."""
    statement = site.block[index]
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        func = statement.value.func
        if isinstance(func, ast.Attribute) and func.attr == "backward" and not isinstance(func.value, (ast.Name, ast.Attribute)):
            return func.value
    return None


def backward_calls(program: Program) -> dict[ast.Call, Backward]:
    """The calls that backpropagate, each with one of its events.

    Raises:
        NotSure: one is outside of this file or is not `x.backward()`.
    """
    found: dict[ast.Call, Backward] = {}
    for event in program.all(Backward):
        call = program.syntax.call_at(event.place)
        if call is None:
            raise NotSure(_elsewhere(program, event))
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "backward":
            raise NotSure("the loss is not backpropagated by `loss.backward()`", call.lineno)
        found.setdefault(call, event)
    return found


def step_calls(program: Program) -> dict[ast.Call, Step]:
    """The calls `optimizer.step()`, each with one of its events.

    Raises:
        NotSure: one is outside of this file or is not a statement of its own.
    """
    found: dict[ast.Call, Step] = {}
    for event in program.all(Step):
        call = program.syntax.call_at(event.place)
        if call is None:
            where = f"{event.place.path}, line {event.place.line}" if event.place else "a place that is not known"
            raise NotSure(f"the optimizer steps in {where}: convert that file")
        if not isinstance(call.func, ast.Attribute) or not isinstance(program.syntax.parents[call], ast.Expr):
            raise NotSure("the optimizer's step is not a statement of its own", call.lineno)
        found.setdefault(call, event)
    return found


def clip_limit(program: Program, event: Clip) -> ast.expr:
    """The limit of a clip that an engine makes as well.

    Raises:
        NotSure: it makes no such clip.
    """
    call = program.syntax.call_at(event.place)
    keyword = {"norm": "max_norm", "value": "clip_value"}.get(event.kind)
    if call is None or keyword is None:
        line = event.place.line if event.place is not None else None
        raise NotSure("gradients are changed in a way that the engine does not know", line)
    statement = program.syntax.statement(call)
    if isinstance(statement, (ast.Expr, ast.Assign)) and _number_of(statement.value) is not call:
        raise NotSure("what the clip returns is used in a way that cannot be followed", statement.lineno)
    limit = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == keyword)]
    others = [k for k in call.keywords if k.arg not in (keyword, "parameters", "foreach", "error_if_nonfinite")]
    if len(limit) != 1 or others or len(call.args) > 2 or event.partial:
        raise NotSure("the clip has options that the engine does not have", call.lineno)
    return limit[0]


def _number_of(node: ast.expr) -> ast.expr:
    """What stands in `float(...)` or before `.item()`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "item":
        return _number_of(node.func.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "float" and node.args:
        return _number_of(node.args[0])
    return node


def engine_lines(name: str, given: list[str], unit: str) -> list[str]:
    """The lines that make an engine."""
    line = f"{name} = halfstep.Engine({', '.join(given)})"
    return [line] if len(line) <= 110 else [f"{name} = halfstep.Engine(", *(f"{unit}{g}," for g in given), ")"]
