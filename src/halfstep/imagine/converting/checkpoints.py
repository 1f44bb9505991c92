"""The scaler's state goes where the optimizer's state goes."""

from __future__ import annotations

import ast

from halfstep.events.vocabulary import Event, Load, Save, Step
from halfstep.imagine.converting.patch import Patch
from halfstep.imagine.converting.program import Program
from halfstep.imagine.converting.reach import Carrier, Home


def add_state(program: Program, patch: Patch, carrier: Carrier, home: Home, name: str) -> None:
    """Save the state of `name` beside the optimizer's, and load it where the optimizer's is loaded."""
    key = name.removeprefix("self.")
    for event in _distinct(program, Save):
        assert isinstance(event, Save)
        if "optimizer" in event.states and not event.states & {"scaler", "?"}:
            _save(program, patch, carrier, event, name, key)
    for event in _distinct(program, Load):
        assert isinstance(event, Load)
        if event.target is not None and event.target.kind == "optimizer":
            _load(program, patch, carrier, event, name, key)


def _distinct(program: Program, kind: type[Event]) -> list[Event]:
    return list({e.stack: e for e in program.all(kind)}.values())


def _save(program: Program, patch: Patch, carrier: Carrier, event: Save, name: str, key: str) -> None:
    function = program.frames(event)[-1].function
    root: ast.AST = function if function is not None else program.syntax.tree
    for node in ast.walk(root):
        if not isinstance(node, ast.Dict):
            continue
        for label, value in zip(node.keys, node.values, strict=True):
            if label is not None and _is_state_of_optimizer(value) and _names_optimizer(program, value):
                carrier.reach(event)
                add_item(patch, label, value, key, name)
                return


def _is_state_of_optimizer(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "state_dict"


def _names_optimizer(program: Program, value: ast.expr) -> bool:
    """Whether a state is the optimizer's: what it is taken of has the name of an optimizer that was heard to step."""
    assert isinstance(value, ast.Call)
    assert isinstance(value.func, ast.Attribute)
    named = {step.optimizer.name for step in program.all(Step)}
    calls = (program.syntax.call_at(step.place) for step in program.all(Step))
    named |= {_last(c.func.value) for c in calls if c is not None and isinstance(c.func, ast.Attribute)}
    return _last(value.func.value) in named


def _last(node: ast.expr) -> str:
    return ast.unparse(node).rsplit(".", 1)[-1]


def add_item(patch: Patch, label: ast.expr, value: ast.expr, key: str, name: str) -> None:
    """Put the state of `name` behind an item of a dictionary; on a line of its own where that has one."""
    quote = patch.syntax.text(label)[0]
    quote = quote if quote in "\"'" else '"'
    item = f"{quote}{key}{quote}: {name}.state_dict()"
    _, end = patch.span(value)
    before = patch.syntax.lines[label.lineno - 1][: label.col_offset]
    patch.put(end, end, f", {item}" if before.strip() else f",\n{before.decode()}{item}")


def _load(program: Program, patch: Patch, carrier: Carrier, event: Load, name: str, key: str) -> None:
    call = program.syntax.call_at(event.place)
    if call is None or len(call.args) != 1:
        return
    source = call.args[0]
    if not isinstance(source, ast.Subscript) or not isinstance(source.slice, ast.Constant):
        return
    carrier.reach(event)
    quote = program.syntax.text(source.slice)[0]
    whole = program.syntax.text(source.value)
    statement = program.syntax.statement(call)
    label = f"{quote}{key}{quote}"
    unit = program.syntax.unit(statement)
    patch.after(statement, f"if {whole}.get({label}):", f"{unit}{name}.load_state_dict({whole}[{label}])")
