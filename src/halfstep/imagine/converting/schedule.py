"""The length of a schedule that moved once a batch, in updates."""

from __future__ import annotations

import ast

from halfstep.events.vocabulary import SchedulerStep, Step
from halfstep.imagine.converting.outcome import NotSure
from halfstep.imagine.converting.patch import Patch
from halfstep.imagine.converting.program import Program


def shorten(program: Program, patch: Patch, window: str) -> bool:
    """Divide lengths in batches by the window, rounded up as there is a shorter last one.

    Returns:
        Whether a schedule moved once a batch.

    Raises:
        NotSure: the length is not written with `len(...)` where it can be found.
    """
    usual = program.usual
    moved = False
    steps = sum(1 for _ in usual.of(Step))
    for scheduler in dict.fromkeys(e.scheduler for e in usual.of(SchedulerStep)):
        moves = sum(e.scheduler == scheduler for e in usual.of(SchedulerStep))
        horizon = usual.fact(scheduler, "horizon")
        moved |= moves >= steps
        if moves < steps or not isinstance(horizon, frozenset) or "loader" not in horizon or horizon & {"accum", "/accum"}:
            continue
        made = usual.made(scheduler)
        call = program.syntax.call_at(made.place) if made is not None else None
        lengths = _lengths(program, call) if call is not None else []
        if not lengths:
            raise NotSure("the schedule's length counts batches, and where it is computed cannot be seen")
        for node in lengths:
            patch.replace(node, f"-(-{program.syntax.text(node)} // {window})")
    return moved


def _lengths(program: Program, call: ast.Call) -> list[ast.Call]:
    """The `len(...)` in the arguments of a call, also through names that have one value and no other use."""
    found: list[ast.Call] = []
    for argument in [*call.args, *(k.value for k in call.keywords)]:
        found += _in(argument)
        for name in [n.id for n in ast.walk(argument) if isinstance(n, ast.Name)]:
            value = _only_for(program, name, call)
            found += _in(value) if value is not None else []
    return found


def _in(node: ast.expr) -> list[ast.Call]:
    return [n for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "len"]


def _only_for(program: Program, name: str, call: ast.Call) -> ast.expr | None:
    """The value of a name that is given once and read only in a call."""
    uses = [n for n in ast.walk(program.syntax.tree) if isinstance(n, ast.Name) and n.id == name]
    inside = set(ast.walk(call))
    stored = [n for n in uses if isinstance(n.ctx, ast.Store)]
    if len(stored) != 1 or any(n not in inside for n in uses if isinstance(n.ctx, ast.Load)):
        return None
    statement = program.syntax.statement(stored[0])
    return statement.value if isinstance(statement, ast.Assign) else None
