"""Methods of models, optimizers, scalers and schedulers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from halfstep.events.vocabulary import (
    AverageUpdate,
    Clip,
    Load,
    Report,
    ScalerUpdate,
    SchedulerStep,
    Step,
    Unscale,
    ZeroGrad,
)
from halfstep.imagine.library import formats, frameworks, tensor_methods, tensors, training
from halfstep.imagine.library.externals import blend
from halfstep.imagine.library.metrics import named
from halfstep.imagine.state import Reach
from halfstep.imagine.values import (
    Bound,
    Function,
    Instance,
    Partial,
    Ratio,
    Tensor,
    Thing,
    Unknown,
    Value,
    model_of,
    parts_of,
    settled,
    tagged,
    tags_of,
)

if TYPE_CHECKING:
    from halfstep.imagine.calls import Calls

Args = list[Value]
Kwargs = dict[str, Value]


def call(state: Calls, thing: Thing, name: str, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    """A method of a library object."""
    if name == "state_dict":
        return state.make("state", None, of=thing.kind, thing=thing)
    if name == "load_state_dict":
        given = settled(args[0]) if args else None
        other = isinstance(given, Thing) and given.facts.get("thing") not in (None, thing)
        state.emit(Load, node, target=thing, handed_over=other)
        thing.facts["loaded"] = True
        return None
    handler = HANDLERS.get(thing.kind, {}).get(name)
    if handler is not None:
        return handler(state, thing, args, kwargs, node)
    if thing.kind == "model":
        return _other_model_method(state, thing, name, args, kwargs, node)
    if thing.kind == "param" and name == "requires_grad_":
        state.setattr(thing, "requires_grad", settled(args[0]) if args else True, node)
        return thing
    if thing.kind == "param" and name.endswith("_"):
        return formats.write_param(state, thing, node)
    if thing.kind == "param" and name == "register_post_accumulate_grad_hook" and args:
        state.memo.setdefault("gradient hooks", []).append((thing, args[0]))
        return Unknown("hook handle")
    if thing.kind == "param" and name == "register_hook" and args:
        state.memo.setdefault("gradient edits", []).append((thing, args[0], node))
        return Unknown("hook handle")
    if thing.kind == "param" and name in ("clone", "detach"):
        return Tensor(name="parameter", dtype="float", tags=frozenset({"copied weights"}))
    if thing.kind in ("param", "params"):
        return formats.read_param(thing, name, [*args, *kwargs.values()])
    if thing.kind == "average" and name in ("update", "update_parameters", "step"):
        state.emit(AverageUpdate, node, target=thing)
        return None
    if thing.kind == "optimizer" and re.search(r"(^|_)step(_|$)", name):
        thing.escaped = True  # a step of a kind that is not known: it may also clear
        return _step(state, thing, [], {}, node)
    return Unknown(f"{thing.name or thing.kind}.{name}()")


# --- models ---


def _parameters(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    made = state.make("params", None)
    made.owners, made.facts["generator"] = {thing}, True
    return made


def _named_parameters(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    made = state.make("params", None)
    made.owners, made.facts["named"] = {thing}, True
    return made


def _set_mode(training_mode: bool) -> Callable[..., Value]:
    def handler(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
        mode = training_mode
        if training_mode and (args or kwargs):
            asked = settled(args[0] if args else kwargs.get("mode"))
            mode = (isinstance(asked, Unknown) and asked.name.endswith(".training")) or state.truth(asked, node)
        training.switch(state, thing, mode, node)
        return thing.facts.get("instance") or thing

    return handler


def _to(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    for value in [*args, *kwargs.values()]:
        dtype = formats.dtype_name(value)
        if dtype in ("float16", "bfloat16", "float32"):
            formats.cast(state, thing, dtype, node)
        device = tensors.device_name(value) or _chosen_device(state, value, node)
        if device is not None:
            _place_on(state, thing, device, value, node)
    return thing.facts.get("instance") or thing


def _chosen_device(state: Calls, value: Value, node: ast.AST) -> str | None:
    """A device that the user chooses: the default, or the CPU in another world."""
    value = settled(value)
    if isinstance(value, Thing) and value.kind == "device":
        value = value.facts.get("type")
    if not isinstance(value, Unknown) or value.default not in ("cuda", "cpu"):
        return None
    return str(state.world.choose(value.name, (value.default, "cpu"), 0, "device", state.place(node)))


def _place_on(state: Calls, thing: Thing, device: str, value: Value, node: ast.AST) -> None:
    thing.device = device
    thing.facts["moved at"] = state.place(node)
    held = settled(value)
    if isinstance(held, Thing):
        thing.facts["indexed device"], thing.facts["device made"] = bool(held.facts.get("indexed")), held.place
    else:
        thing.facts["indexed device"] = not isinstance(held, str) or ":" in held


def _cuda(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    thing.device = "cuda"
    thing.facts["indexed device"] = bool(args)
    thing.facts["device made"] = state.place(node)
    return thing.facts.get("instance") or thing


def _cast_method(dtype: str) -> Callable[..., Value]:
    def handler(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
        formats.cast(state, thing, dtype, node)
        return thing.facts.get("instance") or thing

    return handler


def _zero_model(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    state.emit(ZeroGrad, node, optimizers=Reach(frozenset({thing})))
    return None


def _no_sync(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    return state.make("context", node, what="no_sync", model=thing)


def _requires_grad(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    thing.facts["frozen"] = bool(args) and args[0] is False
    if not args or args[0] is True:
        training.say_released(state, {thing}, node)
    return thing.facts.get("instance") or thing


def _forward(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    return state.forward(thing, args, kwargs, node)


def _same_model(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    return thing.facts.get("instance") or thing


def _clip_model(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    return training.clip(state, thing, "norm", node)


def _join(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    state.make("join", node)
    return state.make("context", None, what="null")


def _other_model_method(state: Calls, thing: Thing, name: str, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    if name in ("apply", "compile", "gradient_checkpointing_enable", "register_comm_hook", "share_memory", "type", "double"):
        return thing.facts.get("instance") or thing
    if name in ("add_module", "register_module", "append") and args and model_of(args[-1]) is not None:
        state.setattr(thing, str(settled(args[0])) if len(args) > 1 else "appended", args[-1], node)
        return None
    if name in ("modules", "children", "named_modules", "named_children"):
        held = formats.all_of(thing) if name.endswith("modules") else parts_of(thing)
        values = [part.facts.get("instance") or part for part in dict.fromkeys(held)]
        return [("name", value) for value in values] if name.startswith("named") else values
    if name == "buffers":
        return []
    made = blend(state, f"{name}()", [*args, *kwargs.values(), thing], node)
    if isinstance(made, Tensor):
        state._mark_distribution(thing, made, node)
    return made


# --- optimizers ---


def _step(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    closure = settled(args[0] if args else kwargs.get("closure"))
    if frameworks.suspended(thing):
        return None
    if isinstance(closure, Tensor):
        thing.escaped = True  # an optimizer that is given the loss makes the gradients itself, and may clear them
    elif closure is not None:
        state.call(closure, [], {}, node)
    say_step(state, thing, None, closure is not None, node)
    return Tensor(dtype="float", name="loss")


def say_step(state: Calls, optimizer: Thing, scaler: Thing | None, closure: bool, node: ast.AST) -> None:
    """An optimizer steps."""
    half = tuple(m for m in optimizer.owners if _dtype(m) == "float16")
    bf16 = tuple(m for m in optimizer.owners if _dtype(m) == "bfloat16")
    heard = len(state.drafts)
    for hook in optimizer.facts.get("before steps", []):
        state.call(hook, [optimizer, (), {}], {}, node)
    for draft in state.drafts[heard:] if scaler is not None else ():
        if draft.kind is Clip:  # a scaler unscales before it steps
            draft.fields["kind"] = "framework"
    state.emit(
        Step, node, optimizer=optimizer, scaler=scaler, closure=closure, region=state.region, half_params=half, bf16_params=bf16
    )
    for hook in optimizer.facts.get("after steps", []):
        state.call(hook, [optimizer, (), {}], {}, node)


def _step_hook(when: str) -> Callable[..., Value]:
    def handler(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
        thing.facts.setdefault(when, []).append(args[0] if args else kwargs.get("hook"))
        return Unknown("hook handle")

    return handler


def _dtype(model: Thing) -> str | None:
    inner = model.facts.get("inner")
    return model.dtype or (_dtype(inner) if isinstance(inner, Thing) else None)


def _zero(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    if not frameworks.suspended(thing):
        state.emit(ZeroGrad, node, optimizers=(thing,))
    return None


def _add_group(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    owners, _, _ = training.params_of(state, args[0] if args else None)
    thing.facts.setdefault("joined", {}).update(dict.fromkeys(owners - thing.owners, len(state.drafts)))
    thing.owners |= owners
    thing.facts["left out"] = set()
    return None


# --- scalers ---


def _optimizer_of(state: Calls, value: Value) -> Thing | None:
    value = settled(value)
    if isinstance(value, Unknown):
        promoted = state.promote(value, "optimizer")
        value = promoted
    if isinstance(value, Instance) and value.thing is not None:
        value = value.thing
    if isinstance(value, Instance):
        inner = [settled(v) for v in value.attrs.values()]
        value = next((v for v in inner if isinstance(v, Thing) and v.kind == "optimizer"), None)
    return value if isinstance(value, Thing) and value.kind == "optimizer" else None


def _scale(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    return tensor_methods.scaled(state, thing, args, node)


def _unscale(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    optimizer = _optimizer_of(state, args[0] if args else kwargs.get("optimizer"))
    thing.escaped |= optimizer is None  # torch's scaler asks for an optimizer: what this one does besides is not known
    told = [optimizer] if optimizer is not None else [t for t in state.things if t.kind == "optimizer"]
    for unscaled in told if thing.facts.get("enabled") is not False else ():
        state.emit(Unscale, node, scaler=thing, optimizer=unscaled)
    return None


def _scaler_step(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    optimizer = _optimizer_of(state, args[0] if args else kwargs.get("optimizer"))
    if optimizer is not None:
        off = thing.facts.get("enabled") is False
        closure = settled(args[1] if len(args) > 1 else kwargs.get("closure"))
        say_step(state, optimizer, None if off else thing, isinstance(closure, (Function, Bound, Partial, Instance)), node)
    return None


def _update(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    if thing.facts.get("enabled") is not False:
        state.emit(ScalerUpdate, node, scaler=thing)
    return None


def _get_scale(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Ratio:
    made = tagged(65536.0, frozenset({"scale"}))
    assert isinstance(made, Ratio)
    return made


def native_scaler(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    """timm's `NativeScaler`: scale, backward, unscale, clip, step and update in one call."""
    scaler = thing.facts["scaler"]
    loss = tensor_methods.scaled(state, scaler, args[:1], node)
    if isinstance(loss, Tensor):
        frameworks.say_backward(state, loss, node)
    if not state.truth(kwargs.get("need_update", kwargs.get("update_grad", True)), node):
        return None
    _unscale(state, scaler, args[1:2], {}, node)
    params = kwargs.get("parameters")
    if params is not None:
        training.clip(state, params, "norm", node)
    _scaler_step(state, scaler, args[1:2], {}, node)
    _update(state, scaler, [], {}, node)
    return None


# --- schedulers ---


def _schedule(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    if frameworks.suspended(thing):
        return None
    metric, measured = "", getattr(settled(args[0]), "name", "") if args else ""
    if isinstance(node, ast.Call) and (node.args or node.keywords):
        metric = named(state, node.args[0] if node.args else node.keywords[0].value)
    watched = settled(args[0]) if args else None
    reduced = re.fullmatch(r"[\w.]+\(\)", measured) or "synced" in tags_of(watched)  # an unknown function may do so
    for loader in () if reduced else getattr(watched, "loaders", ()):
        state.emit(Report, node, loader=loader, kind="schedule")
    optimizer = thing.facts.get("optimizer")
    told: dict[str, Value] = {"metric": metric, "measured": measured, "argument": bool(args or kwargs)}
    state.emit(SchedulerStep, node, scheduler=thing, optimizer=optimizer, **told)
    return None


HANDLERS: dict[str, dict[str, Callable[..., Value]]] = {
    "model": {
        "parameters": _parameters,
        "named_parameters": _named_parameters,
        "train": _set_mode(True),
        "eval": _set_mode(False),
        "to": _to,
        "cuda": _cuda,
        **{name: _cast_method(dtype) for name, dtype in formats.CASTS.items()},
        "zero_grad": _zero_model,
        "no_sync": _no_sync,
        "requires_grad_": _requires_grad,
        "forward": _forward,
        "cpu": _same_model,
        "clip_grad_norm_": _clip_model,
        "join": _join,
    },
    "optimizer": {
        "register_step_pre_hook": _step_hook("before steps"),
        "register_step_post_hook": _step_hook("after steps"),
        "step": _step,
        "zero_grad": _zero,
        "add_param_group": _add_group,
    },
    "scaler": {"scale": _scale, "unscale_": _unscale, "step": _scaler_step, "update": _update, "get_scale": _get_scale},
    "scheduler": {"step": _schedule, "step_update": _schedule},
    "native scaler": {},
}
"""Methods by kind of object."""

__all__ = ["call", "model_of", "native_scaler", "say_step"]
