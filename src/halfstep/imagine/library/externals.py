"""Calls of library functions and classes, and of values nothing is known about."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from halfstep.events.vocabulary import Numeric, Report
from halfstep.imagine.library import (
    amp,
    data,
    distributed,
    frameworks,
    iterating,
    python,
    stdlib,
    tensor_methods,
    tensors,
    training,
)
from halfstep.imagine.naming import MAIN, MODEL
from halfstep.imagine.state import Raised
from halfstep.imagine.values import (
    NO_TAGS,
    External,
    Instance,
    Items,
    Tensor,
    Thing,
    Unknown,
    Value,
    derive,
    flat,
    model_of,
    settled,
    tags_of,
)

if TYPE_CHECKING:
    from halfstep.imagine.calls import Calls

Handler = Callable[..., Value]
TRAINS = re.compile(r"(set_|to_|switch_to_)?train(ing)?(_mode)?$")
"""Names of a model's own methods that set its training mode."""
EXACT: dict[str, Handler] = {
    **python.TABLE,
    **stdlib.TABLE,
    **tensors.TABLE,
    **tensor_methods.TABLE,
    **amp.TABLE,
    **training.TABLE,
    **data.TABLE,
    **distributed.TABLE,
    **frameworks.TABLE,
}
PATTERNS: tuple[tuple[re.Pattern[str], Handler], ...] = (
    *iterating.PATTERNS,
    *training.PATTERNS,
    *amp.PATTERNS,
    *data.PATTERNS,
    *distributed.PATTERNS,
    *frameworks.PATTERNS,
    *tensors.PATTERNS,
)
ESCAPING = ("optimizer", "scheduler", "scaler", "sampler", "loader", "model")


def call(state: Calls, func: External, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
    """Call something of a library."""
    path = canonical(func.path)
    handler = EXACT.get(path)
    if handler is None:
        handler = next((h for pattern, h in PATTERNS if pattern.search(path)), None)
    if handler is not None:
        return handler(state, node, args, kwargs, path)
    if MAIN.search(func.last):
        return Unknown(func.last, frozenset({"main"}))
    escape(state, args, kwargs, node)
    return blend(state, f"{func.path}()", [*args, *kwargs.values()], node)


_ALIASES = (
    ("torch.nn.modules.loss.", "torch.nn."),
    ("torch.nn.utils.clip_grad.", "torch.nn.utils."),
    ("torch.utils.data.dataloader.", "torch.utils.data."),
    ("torch.utils.data.distributed.", "torch.utils.data."),
    ("torch.utils.data.dataset.", "torch.utils.data."),
    ("torch.nn.parallel.distributed.", "torch.nn.parallel."),
    ("torch.distributed.distributed_c10d.", "torch.distributed."),
    ("torch.amp.autocast_mode.", "torch.amp."),
    ("torch.amp.grad_scaler.", "torch.amp."),
    ("torch.cuda.amp.autocast_mode.", "torch.cuda.amp."),
    ("torch.cuda.amp.grad_scaler.", "torch.cuda.amp."),
    ("torch.autograd.grad_mode.", "torch."),
    ("torch.random.", "torch."),
    ("np.", "numpy."),
)


def canonical(path: str) -> str:
    """The usual path of a name that libraries offer at several places."""
    for long, short in _ALIASES:
        if path.startswith(long):
            return short + path[len(long) :]
    return path


def escape(state: Calls, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> None:
    """Objects handed to code that is not heard: it may do anything to them."""
    if state.loops and any(model_of(value) is not None for value in [*args, *kwargs.values()]):
        state.emit(Numeric, node, kind="model handed on")
    for value in flat([*args, *kwargs.values()]):
        value = settled(value)
        if isinstance(value, Thing) and value.kind in ESCAPING and value.kind != "model":
            value.escaped = True
            for inner in ("sampler", "dataset"):
                held = value.facts.get(inner)
                if isinstance(held, Thing):
                    held.escaped = True
        elif isinstance(value, Instance):
            for held in [value.thing, *value.attrs.values()]:
                held = settled(held)
                if isinstance(held, Thing) and held.kind in ESCAPING and held.kind != "model":
                    held.escaped = True


def blend(state: Calls, name: str, values: list[Value], node: ast.AST) -> Value:
    """The result of a call that is not heard, from what went in; of a loader or a loop's items, a wrapper around them."""
    looped = next((v for v in values if isinstance(v, Items) and v.loader is not None), None)
    if looped is not None:
        return looped
    inputs = flat(values)
    tags = frozenset().union(*(tags_of(v) for v in inputs)) if inputs else NO_TAGS
    tensors_in = [v for v in inputs if isinstance(v, Tensor)]
    models = {m for m in (model_of(v) for v in inputs) if m is not None}
    if any(t.grad for t in tensors_in) or (models and state.grad_enabled):
        base = derive(*tensors_in) if tensors_in else Tensor(grad=True)
        made = derive(base, models=base.models | models, grad=state.grad_enabled, dtype=None, tags=base.tags | {"data"})
        made.divisors = base.divisors
        made.reduction = None
        if not any(t.grad for t in tensors_in) or not (models or _LOSS.search(name)):
            made.tags |= {"guess"}
        return made
    if tensors_in:
        return derive(*tensors_in, dtype=None, tags=tags | {"data"})
    passed = [v for v in inputs if isinstance(v, Thing) and v.kind == "loader"]
    if len(passed) == 1 and not models:
        return passed[0]
    loaders = frozenset().union(*(getattr(v, "loaders", frozenset()) for v in inputs if isinstance(v, Unknown)))
    return Unknown(name[:80], tags - {"sum of means"}, loaders=loaders)


_LOSS = re.compile(r"^torch\.|loss|crit|objective|nll|energy|penalty", re.I)
"""Names of functions whose results surely have a graph."""


def call_unknown(state: Calls, func: Unknown, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
    """Call a value nothing is known about; its name may say that it is a model or a criterion."""
    last = func.name.rsplit(".", 1)[-1]
    inputs = [*args, *kwargs.values()]
    if MAIN.search(last):
        return Unknown(last, frozenset({"main"}))
    if last == "assertEqual" and {"cpu", "cuda"} <= {value for value in map(settled, args) if isinstance(value, str)}:
        raise Raised
    if last == "synchronize":
        state.memo["synchronized"] = state.number("time")
    if last in ("all", "any", "item", "bool") and "data" in func.tags:
        return Unknown(func.name, func.tags, normal=func.normal, loaders=func.loaders)
    if MODEL.search(func.name) and func.owner is None and inputs:
        model = state.promote(func, "model")
        assert isinstance(model, Thing)
        return state.forward(model, args, kwargs, node)
    if re.search(r"log|print|report|write|add_scalar", last, re.I):
        shown(state, inputs, node, last)
    if func.owner is not None and func.owner.kind == "model":
        if TRAINS.match(last):
            training.switch(state, func.owner, True, node)
        made = blend(state, f"{func.name}()", [*inputs, func.owner], node)
        if isinstance(made, Tensor):
            state._mark_distribution(func.owner, made, node)
        return made
    escape(state, args, kwargs, node)
    key = f"{func.name}()"
    result = blend(state, key, inputs, node)
    if isinstance(result, Unknown) and all(isinstance(each, str) for each in inputs):
        return func.children.setdefault(f"({', '.join(map(str, inputs))})", result)
    return result


def shown(state: Calls, values: list[Value], node: ast.AST, kind: str) -> None:
    """Numbers are printed or logged: say from which loader they come."""
    for value in flat(values):
        for loader in getattr(value, "loaders", frozenset()):
            state.emit(Report, node, loader=loader, kind=kind)
