"""Methods: of tensors, containers, library objects, and of values whose use shows what they are."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from halfstep.events.vocabulary import Retain, Seed, SetEpoch
from halfstep.imagine.library import frameworks, optimizing, tensor_methods
from halfstep.imagine.library.externals import blend, call_unknown, shown
from halfstep.imagine.library.stdlib import is_constant
from halfstep.imagine.naming import hinted
from halfstep.imagine.values import (
    Bound,
    Function,
    Instance,
    Tensor,
    Thing,
    Unknown,
    Value,
    derive,
    flat,
    model_of,
    settled,
    tagged,
    tags_of,
)

if TYPE_CHECKING:
    from halfstep.imagine.calls import Calls

Args = list[Value]
Kwargs = dict[str, Value]
SCHEDULER = re.compile(r"sched|(^|[._])lr_?s|warmup", re.I)
MODEL = re.compile(r"model|net", re.I)
OPTIMIZER = re.compile(r"opt|(^|[._])(adam|sgd)", re.I)
SCALER = re.compile(r"scaler", re.I)
FRAMEWORK = re.compile(r"(^|[._])(accelerator|fabric)$", re.I)


def call(state: Calls, value: Value, name: str, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    """Call a method that is not the program's own."""
    value = settled(value)
    if isinstance(value, Unknown):
        role = _role(value, name, args)
        if role is None:
            return _on_unknown(state, value, name, args, kwargs, node)
        value = state.promote(value, role)
    if isinstance(value, Tensor):
        return tensor_methods.call(state, value, name, args, kwargs, node)
    if isinstance(value, Thing):
        return _on_thing(state, value, name, args, kwargs, node)
    if isinstance(value, Instance):
        return frameworks.lightning(state, value, name, args, kwargs, node)
    if isinstance(value, (list, dict)) and name in OF_ALL_MODULES:
        return _on_all(state, value, name, args, kwargs, node)
    if isinstance(value, list):
        return _on_list(state, value, name, args, node)
    if isinstance(value, dict):
        return _on_dict(state, value, name, args, kwargs, node)
    if isinstance(value, str):
        return _on_text(value, name, args)
    return blend(state, f"?.{name}()", [*args, *kwargs.values()], node)


def call_thing(state: Calls, value: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    """Call a library object itself."""
    if value.kind == "model":
        return state.forward(value, args, kwargs, node)
    if value.kind == "engine":
        model = value.facts.get("model")
        return (
            state.forward(model, args, kwargs, node)
            if model is not None
            else blend(state, "engine()", [*args, *kwargs.values()], node)
        )
    if value.kind == "criterion":
        return tensor_methods.criterion(state, value, args, kwargs, node)
    if value.kind == "native scaler":
        return optimizing.native_scaler(state, value, args, kwargs, node)
    if value.kind == "context" and args and isinstance(settled(args[0]), Function):
        function = settled(args[0])
        function.wrapped_by = (*function.wrapped_by, value)
        return function
    if value.kind == "average":
        return blend(state, "average()", [*args, *kwargs.values()], node)
    return blend(state, f"{value.kind}()", [*args, *kwargs.values()], node)


def _role(value: Unknown, name: str, args: Args) -> str | None:
    text = value.name
    if value.tags & {"data"} and value.owner is None:
        return None
    if name in ("unscale_", "get_scale") or (name in ("scale", "update", "step") and SCALER.search(text)):
        return "scaler"
    if name == "scale" and args and isinstance(settled(args[0]), Tensor):
        return "scaler"
    if name in ("backward", "accumulate", "prepare") and FRAMEWORK.search(text):
        return None
    if name == "backward":
        return "tensor" if not args else None
    if name == "step":
        return "scheduler" if SCHEDULER.search(text) else "optimizer" if OPTIMIZER.search(text) else None
    if name == "zero_grad":
        return "model" if MODEL.search(text) else "optimizer"
    if name in ("parameters", "named_parameters", "no_sync", "eval", "train", "requires_grad_", "half", "bfloat16", "modules"):
        return "model" if not value.loaders else None
    if name == "set_epoch":
        return "sampler"
    if name == "state_dict":
        return (
            "scheduler"
            if SCHEDULER.search(text)
            else "optimizer"
            if "opt" in text
            else "scaler"
            if SCALER.search(text)
            else "model"
        )
    if name in ("to", "cuda") and re.search(
        r"(^|[._])(model|net|network|backbone|encoder|decoder|student|teacher|generator|critic|actor|policy)$", text, re.I
    ):
        return "model"
    return None


def _on_unknown(state: Calls, value: Unknown, name: str, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    if value.loaders and name in ("to", "cuda", "float", "half", "long", "cpu"):
        tensor = Tensor(loaders=value.loaders, tags=value.tags, dtype=None)
        return tensor_methods.call(state, tensor, name, args, kwargs, node)
    if FRAMEWORK.search(value.name) and name in frameworks.METHODS:
        made = state.make("framework", None, name=value.name, given=True, framework="accelerator", window=4, count=0, sync=True)
        value.thing = made
        return frameworks.call(state, made, name, args, kwargs, node)
    if name == "backward" and args and isinstance(settled(args[0]), Tensor):
        frameworks.say_divided_backward(state, settled(args[0]), node)
        return None
    if name in ("item", "tolist", "numpy", "all", "any", "float", "cpu", "detach", "mean", "sum"):
        return Unknown(value.name, value.tags, normal=value.normal, loaders=value.loaders)
    if name in ("items", "keys", "values") and value.loaders:
        element = Tensor(loaders=value.loaders)
        return [("key", element)] if name == "items" else ["key"] if name == "keys" else [element]
    if name in ("items", "keys", "values"):
        keys = [Unknown(f"{value.name} key {index}") for index in range(2)]
        held = [value.children.setdefault(f"[{key.name}]", Unknown(f"{value.name}[{key.name}]", value.tags)) for key in keys]
        return list(zip(keys, held, strict=True)) if name == "items" else keys if name == "keys" else held
    if name == "get" and args and isinstance(args[0], str):
        child = value.children.get(f"[{args[0]!r}]")
        return (
            child
            if child is not None
            else hinted(args[0], Unknown(f"{value.name}[{args[0]!r}]", value.tags - {"loaded"}, loaders=value.loaders))
        )
    child = value.children.setdefault(
        f".{name}", Unknown(f"{value.name}.{name}", value.tags, owner=value.owner, loaders=value.loaders)
    )
    return call_unknown(state, child, args, kwargs, node) if isinstance(child, Unknown) else state.call(child, args, kwargs, node)


def _on_thing(state: Calls, value: Thing, name: str, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    if value.kind == "framework":
        return frameworks.call(state, value, name, args, kwargs, node)
    if value.kind == "engine":
        return frameworks.call_engine(state, value, name, args, kwargs, node)
    if value.kind == "parser":
        return _on_parser(state, value, name, args, kwargs, node)
    if value.kind == "stack":
        return _on_stack(state, value, name, args, node)
    if value.kind == "context" and name in ("__enter__", "__exit__"):
        return _by_hand(state, value, name, node)
    if value.kind in ("sampler", "dataset", "loader") and name == "set_epoch":
        if not value.facts.get("plain"):
            argument = settled(args[0]) if args else None
            state.emit(SetEpoch, node, target=value, value=argument if isinstance(argument, int) else state.number("value"))
        return None
    if value.kind == "defaultdict":
        table = value.facts.setdefault("table", {})
        return _on_dict(state, table, name, args, kwargs, node)
    if value.kind == "super":
        return None
    if value.kind == "generator" and name == "manual_seed":
        value.facts["constant"] = bool(args) and is_constant(args[0])
        state.emit(Seed, node, constant=value.facts["constant"], own=True)
        return value
    if value.kind == "params" and name in ("__iter__",):
        return value
    return optimizing.call(state, value, name, args, kwargs, node)


def _on_parser(state: Calls, parser: Thing, name: str, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    options = parser.facts["options"]
    if name == "add_argument":
        flags = [a for a in args if isinstance(a, str)]
        if flags:
            dest = kwargs.get("dest") or max(flags, key=len).lstrip("-").replace("-", "_")
            options[dest] = _option(str(dest), kwargs)
            state.memo.setdefault("options", {})[dest] = (kwargs.get("default"), kwargs.get("choices"))
        return None
    if name in ("parse_args", "parse_known_args"):
        made = Unknown("args")
        made.children.update({f".{key}": value for key, value in options.items()})
        return made if name == "parse_args" else (made, Unknown("rest"))
    return parser if name.startswith("add_") else None


def _option(name: str, kwargs: Kwargs) -> Value:
    default = kwargs.get("default")
    action = kwargs.get("action")
    if action in ("store_true", "store_false"):
        return Unknown(f"args.{name}", default=action == "store_false", has_default=True)
    if isinstance(default, bool) or default is None:
        return hinted(name, Unknown(f"args.{name}", default=default, has_default=default is not None or "default" in kwargs))
    if isinstance(default, str):
        return Unknown(f"args.{name}", default=default, has_default=True)
    chosen = hinted(name, default)
    return tagged(chosen, tags_of(chosen) | {"option"}) if default == 1 and "world" in tags_of(chosen) else chosen


def _by_hand(state: Calls, context: Thing, name: str, node: ast.AST) -> Value:
    """A context that is opened and closed without a `with`."""
    opened = context.facts.setdefault("opened", [])
    if name == "__enter__":
        opened.append(state.open_context(context, node))
    elif opened:
        opened.pop()()
    return context.facts.get("value", context)


def _on_stack(state: Calls, stack: Thing, name: str, args: Args, node: ast.AST) -> Value:
    context = settled(args[0]) if args else None
    if name == "enter_context" and isinstance(context, Thing) and context.kind == "context":
        stack.facts.setdefault("open", []).insert(0, state.open_context(context, node))
    if name in ("close", "__exit__"):
        for leave in stack.facts.pop("open", []):
            leave()
    return context if name == "enter_context" else stack


OF_ALL_MODULES = frozenset(
    {"parameters", "named_parameters", "train", "eval", "cuda", "half", "bfloat16", "zero_grad", "requires_grad_"}
)
"""Methods of a list or dict of modules that go to each of them."""


def _on_all(state: Calls, value: Value, name: str, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    models = [m for m in map(model_of, flat([value])) if m is not None]
    if name.endswith("parameters"):
        made = state.make("params", None)
        made.owners, made.facts["generator"], made.facts["named"] = set(models), True, name.startswith("named")
        return made
    for model in models:
        _on_thing(state, model, name, args, kwargs, node)
    return value


def _on_list(state: Calls, value: list[Value], name: str, args: Args, node: ast.AST) -> Value:
    item = settled(args[0]) if args else None
    if name in ("append", "add", "extend", "insert"):
        new = list(item) if name == "extend" and isinstance(item, (list, tuple)) else [args[-1]] if args else []
        for element in new:
            _keep(state, value, settled(element), node)
            state.take_in(value, "appended", element, node)
            if isinstance(picked := settled(element), Thing) and picked.kind == "param":
                picked.facts["picked"] = True
        if name == "append" and any(_micro_batch(element) for element in new):
            state.memo["gathered", id(value)] = value
        if len(value) < 400:
            value.extend(new)
        return None
    if name == "clear":
        value.clear()
        state.memo.pop(("container", id(value)), None)
        return None
    if name in ("remove", "discard"):
        value[:] = [
            other for other in value if settled(other) is not item and (not isinstance(item, (str, int)) or other != item)
        ]
        return None
    if name == "pop":
        return value.pop() if value else Unknown("pop")
    if name == "index":
        return 0
    return list(value) if name == "copy" else None


def _micro_batch(value: Value) -> bool:
    """Whether a value is what a loop over a loader hands out: the batch itself, or its parts together."""
    value = settled(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    whole = isinstance(value, Tensor) and value.name == "batch"
    return whole or any(isinstance(part := settled(p), Tensor) and bool(part.loaders) and not part.grad for p in parts)


def _keep(state: Calls, container: list[Value], element: Value, node: ast.AST) -> None:
    for tensor in (v for v in flat([element]) if isinstance(v, Tensor)):
        if not tensor.grad or not state.grad_enabled or tensor.name == "parameter" or "guess" in tensor.tags:
            continue
        key = ("container", id(container))
        number = state.memo.get(key)
        if number is None:
            number = state.memo[key] = state.number("container")
            state.memo[("alive", number)] = container
        state.memo[("list", id(tensor))] = state.memo.get(("list", id(tensor)), frozenset()) | {number}
        state.memo[("alive tensor", id(tensor))] = tensor
        state.emit(Retain, node, container=number, name="list")


def _on_dict(state: Calls, value: dict[Value, Value], name: str, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    key = settled(args[0]) if args else None
    if name == "get":
        found = value.get(key) if isinstance(key, (str, int)) else None
        return found if found is not None else args[1] if len(args) > 1 else None
    if name == "items":
        return list(value.items())
    if name == "keys":
        return list(value)
    if name == "values":
        return list(value.values())
    if name == "update":
        new = settled(args[0]) if args else {}
        for each, item in {**(new if isinstance(new, dict) else {}), **kwargs}.items():
            state.setitem(value, each, item, node)
        return None
    if name == "setdefault" and isinstance(key, (str, int)):
        return value.setdefault(key, args[1] if len(args) > 1 else None)
    if name == "pop":
        return value.pop(key, args[1] if len(args) > 1 else Unknown("pop")) if isinstance(key, (str, int)) else Unknown("pop")
    if name == "copy":
        return dict(value)
    if name == "clear":
        value.clear()
        return None
    if name == "to":
        return {
            k: tensor_methods.call(state, v, "to", args, kwargs, node) if isinstance(v, Tensor) else v for k, v in value.items()
        }
    return None


def _on_text(value: str, name: str, args: Args) -> Value:
    plain = [a for a in args if isinstance(a, str)]
    if name in ("lower", "upper", "strip", "startswith", "endswith", "replace", "split") and len(plain) == len(args):
        try:
            return getattr(value, name)(*plain)
        except (TypeError, ValueError):
            return value
    return Unknown(f"'{value[:20]}'.{name}()", tags_of(args))


__all__ = ["Bound", "call", "call_thing", "derive", "model_of", "shown"]
