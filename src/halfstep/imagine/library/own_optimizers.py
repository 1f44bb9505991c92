"""Optimizers of the program's own classes."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from halfstep.events.vocabulary import Step
from halfstep.imagine.library.optimizing import say_step
from halfstep.imagine.library.training import params_of
from halfstep.imagine.values import Bound, Class, Instance, Thing, Value, settled

if TYPE_CHECKING:
    from halfstep.imagine.calls import Calls

Args = list[Value]
Kwargs = dict[str, Value]


def make(state: Calls, cls: Class, values: Args, node: ast.AST) -> Thing:
    """An optimizer of a class of the program, with the parameters that it is given (and may still walk over)."""
    generators = [v for v in map(settled, values) if isinstance(v, Thing) and v.kind == "params" and not v.facts.get("used")]
    held = [params_of(state, value) for value in values]
    for generator in generators:
        generator.facts["used"] = False
    owners = set[Thing]().union(*(found for found, _, _ in held))
    facts: dict[str, Value] = {"lr": None, "class": cls.name, "whole": any(whole for found, whole, _ in held if found)}
    made = state.make("optimizer", node, **facts)
    made.owners = owners
    return made


def settle(state: Calls, made: Instance, thing: Thing) -> None:
    """One that holds an optimizer of a library stands for it."""
    inner = next((v for v in map(settled, made.attrs.values()) if isinstance(v, Thing) and v.kind == "optimizer"), None)
    if inner is not None:
        state.forget(thing)
        made.thing = inner


def step(state: Calls, thing: Thing, bound: Bound, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    """The `step` of an optimizer of the program: a step, unless an optimizer that it holds makes it."""
    assert bound.target is not None
    closure = bool(args or kwargs)
    before = len(state.drafts)
    if not closure:
        say_step(state, thing, None, closure, node)
    said = len(state.drafts)
    result = state.call_function(bound.target, [bound.self_value, *args], kwargs, node)
    heard = any(draft.kind is Step for draft in state.drafts[said:])
    if heard:
        state.drafts[before:said] = [draft for draft in state.drafts[before:said] if draft.kind is not Step]
    elif closure:
        say_step(state, thing, None, closure, node)
    return result
