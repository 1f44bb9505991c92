"""Python's own functions and the standard library, as far as training loops use them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING

from halfstep.events.vocabulary import HostRead, RacyRead
from halfstep.imagine.arithmetic import arithmetic
from halfstep.imagine.comprehensions import generator_of
from halfstep.imagine.cursors import Cursor, collected
from halfstep.imagine.library import iterating
from halfstep.imagine.naming import hinted
from halfstep.imagine.values import (
    NO_TAGS,
    Class,
    External,
    Function,
    Instance,
    Items,
    Scope,
    Stream,
    Tensor,
    Thing,
    Truth,
    Unknown,
    Value,
    derive,
    items_like,
    settled,
    tagged,
    tags_of,
)

if TYPE_CHECKING:
    from halfstep.imagine.calls import Calls

Args = list[Value]
Kwargs = dict[str, Value]


def _same_items(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    value = settled(args[0]) if args else None
    if isinstance(value, Thing) and value.kind == "params":
        copied = state.make("params", None, owners=value.owners)
        copied.owners, copied.facts = value.owners, {**value.facts, "generator": False}
        return copied
    if isinstance(value, Cursor):
        return value.rest()
    if isinstance(value, (list, tuple)):
        values = list(value)[::-1] if path == "builtins.reversed" else list(value)
        if isinstance(value, Items):
            total, values = value.total, items_like(values, value)
            values.total = total
        return values
    if isinstance(value, dict):
        return list(value)
    if isinstance(value, Stream):
        return collected(state, value, whole=True).rest()
    if isinstance(value, Thing):
        return state.items(value, node)
    return value if value is not None else []


def _sum(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    value = settled(args[0]) if args else None
    value = collected(state, value, whole=True) if isinstance(value, Stream) else value
    if isinstance(value, (list, tuple)):
        return total_of(state, list(value), node)
    if isinstance(value, Unknown):
        return Unknown(f"sum({value.name})", value.tags)
    return derive(value) if isinstance(value, Tensor) else Unknown("sum")


def _mean(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    """The mean of a list of numbers that weigh alike."""
    from halfstep.imagine.library.externals import blend

    value = settled(args[0]) if args else None
    if not isinstance(value, (list, tuple)) or len(args) > 1 or kwargs:
        return blend(state, path, [*args, *kwargs.values()], node)
    count = iterating.TABLE["builtins.len"](state, node, args, {}, path)
    return arithmetic(state, total_of(state, list(value), node), ast.Div(), count, node)


def total_of(state: Calls, values: list[Value], node: ast.AST) -> Value:
    """The sum of a list."""
    values = [settled(v) for v in values]
    tensors = [v for v in values if isinstance(v, Tensor)]
    if tensors:
        retained = frozenset().union(*(state.memo.get(("list", id(v)), frozenset()) for v in values))
        made = derive(*tensors)
        made.retained |= retained
        made.tags |= {"several"} if len(tensors) > 1 else NO_TAGS
        return made
    numbers = [v for v in values if isinstance(v, (int, float))]
    if len(numbers) == len(values):
        return sum(numbers)
    return Unknown("sum", tags_of(values), loaders=frozenset().union(*(getattr(v, "loaders", frozenset()) for v in values)))


def _extreme(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    values = [settled(a) for a in (args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args)]
    tags = tags_of(values)
    numbers = [v for v in values if isinstance(v, (int, float))]
    if values and len(numbers) == len(values):
        return tagged(max(numbers) if path.endswith("max") else min(numbers), tags - {"index"})
    tensors = [v for v in values if isinstance(v, Tensor)]
    return derive(*tensors) if tensors else Unknown(path, tags)


def _number(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    value = state.unwrap_truth(settled(args[0])) if args else 0
    if isinstance(value, Tensor):
        return read_on_host(state, value, node, path.rsplit(".", 1)[-1])
    if isinstance(value, (int, float)):
        kind: Callable[[Value], Value] = int if path.endswith("int") else float
        try:
            return tagged(kind(value), tags_of(value))
        except (ValueError, OverflowError):
            return Unknown("number", tags_of(value))
    if isinstance(value, str):
        try:
            return int(value) if path.endswith("int") else float(value)
        except ValueError:
            return Unknown("number")
    if isinstance(value, Unknown):
        return value
    return Unknown("number", tags_of(value))


def read_on_host(state: Calls, value: Tensor, node: ast.AST, what: str) -> Unknown:
    """The host reads a tensor's number."""
    state.emit(HostRead, node, what=what, scaled=value.scaler is not None, device=value.device)
    if value.copied is not None and not state.memo.get("synchronized", 0) > state.memo.get(("copied", value.copied), 0):
        state.emit(RacyRead, node, copied=value.copied)
    tags = (value.tags | {"data"}) - {"batch size"}
    if value.reduction == "mean" and "mean by name" not in value.tags:
        tags |= {"sum of means"} if state.grad_enabled else {"sum of means", "evaluated"}
    return Unknown(value.name or "value", tags, loaders=value.loaders)


def _text(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    value = state.unwrap_truth(settled(args[0])) if args else ""
    if isinstance(value, Unknown):
        return value
    return str(value) if isinstance(value, (str, int, float)) else Unknown("text", tags_of(value))


def _bool(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    value = settled(args[0]) if args else False
    if isinstance(value, (Unknown, Tensor)):
        if isinstance(value, Tensor):
            return Unknown("condition", value.tags | {"data"}, loaders=value.loaders)
        return value
    return Truth(state.truth(value, node), tags_of(value))


_CLASSES = {
    "model": ("Module",),
    "ddp": ("Module", "DistributedDataParallel", "DDP"),
    "parallel": ("Module", "DataParallel"),
    "loader": ("DataLoader",),
    "dataset": ("Dataset",),
    "optimizer": ("Optimizer",),
    "scheduler": ("LRScheduler", "_LRScheduler"),
    "scaler": ("GradScaler",),
}
"""Names of the classes that library objects are instances of, by kind or wrapper."""


def _isinstance(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    value = settled(args[0]) if args else None
    kinds = args[1] if len(args) > 1 else None
    kinds = list(kinds) if isinstance(kinds, (tuple, list)) else [kinds]
    if isinstance(value, Instance):
        names = {k.name for k in kinds if isinstance(k, Class)} | {k.last for k in kinds if isinstance(k, External)}
        return value.cls.name in names or value.cls.is_a(*names)
    lasts = {k.last for k in kinds if isinstance(k, External)} | {k.name for k in kinds if isinstance(k, (Class, Unknown))}
    if isinstance(value, Tensor):
        return bool(lasts & {"Tensor", "FloatTensor"})
    if isinstance(value, Thing):
        return bool(lasts & {value.facts.get("class"), *_CLASSES.get(str(value.facts.get("wrapper", value.kind)), ())})
    if isinstance(value, Unknown):
        return Unknown(f"isinstance({value.name}, {sorted(lasts)})", default=False, has_default=True)
    names = {type(value).__name__, *(base.__name__ for base in type(value).__mro__)} - {"object"}
    return bool(names & lasts)


def _is_tensor(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    return _isinstance(state, node, [*args[:1], External("torch.Tensor")], {}, path)


def _hasattr(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    if len(args) < 2:
        return False
    value, name = settled(args[0]), args[1]
    if isinstance(value, Thing):
        if value.kind == "sampler":
            return name == "set_epoch" and bool(value.facts.get("distributed"))
        if value.kind == "model" and name in ("module", "no_sync"):
            return value.facts.get("inner") is not None
        return name in value.attrs or not str(name).startswith("_")
    if isinstance(value, Tensor) and name in ("to", "cuda", "cpu", "device", "shape", "detach", "size", "dim"):
        return True
    if isinstance(value, Instance):
        return name in value.attrs or value.cls.lookup(name) is not None if isinstance(name, str) else False
    if value is None or isinstance(value, (int, float, str)):
        return False
    return Unknown(f"hasattr({getattr(value, 'name', '?')}, {name!r})", default=False, has_default=True)


def _getattr(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    value, name = settled(args[0]), settled(args[1]) if len(args) > 1 else None
    if isinstance(name, Unknown) and name.has_default:
        name = name.default
    if not isinstance(name, str):
        return Unknown("getattr")
    if isinstance(value, Instance) and name not in value.attrs and value.cls.lookup(name) is None and len(args) > 2:
        return args[2]
    mark = isinstance(value, Thing) and name not in value.attrs and len(args) > 2 and isinstance(args[2], (bool, int))
    if value is None or mark:
        return args[2] if len(args) > 2 else Unknown("getattr")
    if len(args) > 2 and isinstance(value, Unknown) and f".{name}" not in value.children and args[2] is not None:
        return hinted(
            name,
            args[2] if isinstance(args[2], (int, float)) and not isinstance(args[2], bool) else state.getattr(value, name, node),
        )
    return state.getattr(value, name, node)


def _setattr(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    if len(args) == 3 and isinstance(args[1], str):
        state.setattr(args[0], args[1], args[2], node)
    return None


def _print(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    from halfstep.imagine.library.externals import shown

    for value in args:
        if isinstance(settled(value), Tensor):
            read_on_host(state, settled(value), node, "print")
    shown(state, args, node, "print")
    return None


def _super(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    scope: Scope | None = state.scope
    while scope is not None and "\0class" not in scope.names:
        scope = scope.outer
    made = state.make("context", None, what="super")
    made.kind = "super"
    if scope is not None:
        made.facts.update(cls=scope.names["\0class"], instance=scope.names["\0self"])
    return made


def _map(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    sources = [state.items(settled(a), node) for a in args[1:]]
    if not sources:
        return []
    return items_like([state.call(args[0], list(group), {}, node) for group in zip(*sources, strict=False)], sources[0])


def _filter(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    """What a function chooses of parameters; of other things, whose numbers are not known, all."""
    items = state.items(settled(args[1]), node) if len(args) > 1 else Items()
    asked = isinstance(settled(args[0]), Function) and any(isinstance(v, Thing) and v.kind == "param" for v in items)
    chosen = [v for v in items if state.truth(state.call(args[0], [v], {}, node), node)] if asked else items
    return generator_of(state, chosen)


def _dict(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    base = settled(args[0]) if args else {}
    named = {key: hinted(key, value) for key, value in kwargs.items()}
    return {**base, **named} if isinstance(base, dict) else named


def _any_all(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    values = settled(args[0]) if args else []
    if isinstance(values, (Unknown, Tensor)):
        return Unknown(path, tags_of(values))
    truths = [state.truth(v, node) for v in list(values)[:64]] if isinstance(values, (list, tuple)) else []
    return any(truths) if path.endswith("any") else all(truths)


def _type(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    value = settled(args[0]) if args else None
    return value.cls if isinstance(value, Instance) else Unknown("type")


def _sorted(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    values = _same_items(state, node, args, {}, path)
    key = kwargs.get("key")
    if not isinstance(values, list) or key is None:
        return values
    ranks = [settled(state.call(key, [value], {}, node)) for value in values]
    if not all(isinstance(rank, (int, float)) for rank in ranks):
        return values
    order = sorted(range(len(values)), key=ranks.__getitem__, reverse=kwargs.get("reverse") is True)
    chosen = [values[index] for index in order]
    return items_like(chosen, values) if isinstance(values, Items) else chosen


TABLE: dict[str, Callable[..., Value]] = {
    **iterating.TABLE,
    "builtins.id": lambda s, n, a, k, p: id(settled(a[0])) if a else Unknown("id"),
    "builtins.list": _same_items,
    "builtins.tuple": _same_items,
    "builtins.sorted": _sorted,
    "builtins.reversed": _same_items,
    "builtins.set": _same_items,
    **dict.fromkeys(("builtins.sum", "math.fsum", "numpy.sum"), _sum),
    **dict.fromkeys(("statistics.fmean", "statistics.mean", "numpy.mean"), _mean),
    "builtins.max": _extreme,
    "builtins.min": _extreme,
    "builtins.int": _number,
    "builtins.float": _number,
    "builtins.round": _number,
    "builtins.abs": _number,
    "builtins.str": _text,
    "builtins.bool": _bool,
    "builtins.isinstance": _isinstance,
    "torch.is_tensor": _is_tensor,
    "builtins.hasattr": _hasattr,
    "builtins.getattr": _getattr,
    "builtins.setattr": _setattr,
    "builtins.print": _print,
    "builtins.super": _super,
    "builtins.map": _map,
    "builtins.filter": _filter,
    "builtins.dict": _dict,
    "builtins.any": _any_all,
    "builtins.all": _any_all,
    "builtins.type": _type,
}
"""Handlers by path."""
