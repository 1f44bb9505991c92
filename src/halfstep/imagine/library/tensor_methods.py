"""Methods of tensors, and criteria."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from halfstep.events.vocabulary import Divisor, HostRead, ScaleLoss, Transfer, ZeroGrad
from halfstep.imagine.arithmetic import arithmetic
from halfstep.imagine.library import formats, tensors, training
from halfstep.imagine.library.frameworks import say_backward
from halfstep.imagine.library.python import read_on_host
from halfstep.imagine.state import Reach
from halfstep.imagine.values import Tensor, Thing, Unknown, Value, derive, flat, part_of, settled, tags_of

if TYPE_CHECKING:
    from halfstep.imagine.calls import Calls

Args = list[Value]
Kwargs = dict[str, Value]
OPERATORS = {"div": ast.Div(), "true_divide": ast.Div(), "divide": ast.Div(), "mul": ast.Mult(), "multiply": ast.Mult()}
HOST_READS = {"item", "tolist", "numpy"}
IN_PLACE_WRITES = {"lerp_", "mul_", "copy_", "add_", "sub_", "div_", "clamp_", "zero_", "fill_", "data.copy_"}
SAME = {
    "contiguous",
    "view",
    "reshape",
    "squeeze",
    "unsqueeze",
    "flatten",
    "transpose",
    "permute",
    "expand",
    "clone",
    "requires_grad_",
    "chunk",
    "split",
    "t",
}


def call(state: Calls, value: Tensor, name: str, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    """A method of a tensor."""
    if name == "backward":
        seed = settled(args[0] if args else kwargs.get("gradient"))
        weighed = (Divisor(None, tags_of(seed), state.place(node)),) if seed is not None else ()
        scaler = value.scaler or getattr(seed, "scaler", None)
        value.tags -= {"guess"}
        say_backward(state, derive(value, divisors=(*value.divisors, *weighed), scaler=scaler), node)
        return None
    if name in HOST_READS:
        return read_on_host(state, value, node, name)
    if name in ("to", "cuda", "cpu", "type", "type_as"):
        return _move(state, value, name, args, kwargs, node)
    if name in ("detach", "detach_"):
        return derive(value, grad=False, models=frozenset(), regions=(), name=value.name, copied=value.copied)
    if name in ("float", "double", "half", "bfloat16", "long", "int", "bool"):
        kinds = {"float": "float", "double": "float", "half": "half", "bfloat16": "bfloat", "bool": "bool"}
        return derive(value, dtype=kinds.get(name, "int"), copied=value.copied, rows=value.rows)
    if "copied weights" in value.tags and name in IN_PLACE_WRITES:
        state.say_averaged(node)
        return value
    if "gradient" in value.tags and name in IN_PLACE_WRITES:
        return _edit_gradient(state, value, name, args, node)
    if name in ("size", "numel", "dim"):
        return Unknown("batch size", frozenset({"batch size"}))
    if name in ("all", "any"):
        return Unknown("condition", value.tags | {"data"}, loaders=value.loaders)
    if name in ("chunk", "split", "unbind", "tensor_split"):
        made = part_of([derive(value) for _ in range(_pieces(value, name, settled(args[0]) if args else None))])
        made.tags |= tags_of(args)
        return made
    if name in ("max", "min", "topk", "sort") and (args or kwargs) and name != "max":
        return derive(value)
    if name in ("items", "keys", "values") and not value.grad:
        return [("key", derive(value))] if name == "items" else ["key"] if name == "keys" else [derive(value)]
    if name == "unsqueeze" and args and args[0] != 0:
        return derive(value, name=value.name, rows=value.rows)
    if name in SAME:
        leaf = name == "requires_grad_" and not value.grad
        return derive(value, grad=value.grad or leaf, name="parameter" if leaf else value.name)
    if name in ("pin_memory", "share_memory_"):
        return value
    if name.startswith("new_"):
        return Tensor(dtype=value.dtype, device=value.device)
    if name in OPERATORS and args:
        return arithmetic(state, value, OPERATORS[name], settled(args[0]), node)
    if name.endswith("_") and name[:-1] in OPERATORS and args:
        value.divisors = getattr(arithmetic(state, value, OPERATORS[name[:-1]], settled(args[0]), node), "divisors", ())
        return value
    return tensors.apply(state, name.rstrip("_") if name != "masked_fill_" else name, [value, *args], kwargs, node)


def _pieces(value: Tensor, name: str, by: Value) -> int:
    """How many tensors one is cut into; four where that is not said."""
    if name == "chunk" and isinstance(by, int):
        return min(by, 64)
    if name == "split" and isinstance(by, int) and by > 0 and value.rows is not None and not value.loaders:
        return min(-(-value.rows // by), 64)
    return 4


def _edit_gradient(state: Calls, value: Tensor, name: str, args: Args, node: ast.AST) -> Value:
    by = settled(args[0]) if args else None
    if name == "zero_" or (name == "fill_" and by == 0):
        state.emit(ZeroGrad, node, optimizers=Reach(value.models))
        return value
    kind = {"clamp_": "value", "clip_": "value", "fill_": "set"}.get(name, "")
    training.edit_gradients(state, set(value.models), training.factor(state, name, by, node), node, kind)
    return value


def _move(state: Calls, value: Tensor, name: str, args: Args, kwargs: Kwargs, node: ast.AST) -> Tensor:
    target = "cpu" if name == "cpu" else "cuda" if name == "cuda" else None
    for arg in [*args, *kwargs.values()]:
        target = target or tensors.usual_device(arg) if not isinstance(arg, bool) else target
    dtype = next((d for d in (formats.dtype_name(a) for a in [*args, kwargs.get("dtype")]) if d in _DTYPES), None)
    if isinstance(settled(args[0]) if args else None, Unknown) and str(getattr(settled(args[0]), "name", "")).endswith(".dtype"):
        dtype = None
        kind = str(settled(args[0]).name).split(".")[0]
        same = kind if kind in ("half", "float", "bfloat") else value.dtype
    else:
        like = settled(args[0]) if args else None
        same = like.dtype if isinstance(like, Tensor) else value.dtype
    lagging = kwargs.get("non_blocking") is True or (name in ("to",) and len(args) > 1 and args[1] is True)
    unknown_device = target is None and bool(args) and dtype is None and isinstance(settled(args[0]), (Unknown, Thing))
    if target is not None or unknown_device:
        loader = next(iter(value.loaders), None)
        state.emit(Transfer, node, to=target or "device", blocking=not lagging, loader=loader, in_worker=state.in_worker)
    if target == "cpu" and value.device == "cuda" and not lagging:
        state.emit(HostRead, node, what=name, scaled=value.scaler is not None, device=value.device)
    moved = derive(value, dtype=_DTYPES.get(dtype or "", same), device=target or value.device, name=value.name, rows=value.rows)
    if target == "cpu" and lagging:
        moved.copied = state.place(node)
        state.memo[("copied", moved.copied)] = state.number("time")
    return moved


_DTYPES = {
    "float16": "half",
    "bfloat16": "bfloat",
    "float32": "float",
    "float64": "float",
    "long": "int",
    "int64": "int",
    "int": "int",
    "bool": "bool",
}


def criterion(state: Calls, value: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    """Call a loss module."""
    options = value.facts.get("options", {})
    name = str(value.facts.get("criterion"))
    given = {k: v for k, v in options.items() if k in ("reduction", "ignore_index")}
    return tensors.loss(state, name, args, {**kwargs, **given}, node)


def scaled(state: Calls, scaler: Thing, args: Args, node: ast.AST) -> Value:
    """`scaler.scale(loss)`."""
    values = settled(args[0]) if args else None
    if isinstance(values, (list, tuple)):
        return [scaled(state, scaler, [v], node) for v in values]
    if scaler.facts.get("enabled") is False:
        return values
    state.emit(ScaleLoss, node, scaler=scaler)
    if isinstance(values, Unknown):
        values = state.promote(values, "tensor")
    if not isinstance(values, Tensor):
        return values
    return derive(values, scaler=scaler)


def _all_backward(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    """`torch.autograd.backward`: of several tensors at once, which are scaled if all of them are."""
    tensors_in = [v for v in flat(args[:1] or list(kwargs.values())[:1]) if isinstance(v, Tensor)]
    seeds = [v for v in flat(args[1:2]) if isinstance(v, Tensor)]
    if tensors_in:
        made, bare = derive(*tensors_in), any(t.scaler is None for t in tensors_in)
        say_backward(state, derive(made, scaler=next((s.scaler for s in seeds), None) if bare else made.scaler), node)
    return None


def _parts(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    value = settled(args[0]) if args else None
    return call(state, value, path.rsplit(".", 1)[-1], args[1:], kwargs, node) if isinstance(value, Tensor) else Unknown("parts")


TABLE = {
    **dict.fromkeys(("torch.chunk", "torch.split", "torch.tensor_split"), _parts),
    "torch.autograd.backward": _all_backward,
}
"""Handlers by path."""
