"""Accelerate, Fabric, DeepSpeed and Lightning: their calls as events of the loop."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from halfstep.events.vocabulary import Backward, Clip, Divisor
from halfstep.imagine.library.training import params_of
from halfstep.imagine.state import ACCUMULATION, Reach
from halfstep.imagine.values import Function, Tensor, Thing, Unknown, Value, derive, model_of, settled

if TYPE_CHECKING:
    from halfstep.imagine.calls import Calls

Args = list[Value]
Kwargs = dict[str, Value]


def _framework(kind: str) -> Callable[..., Value]:
    def handler(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
        steps = settled(kwargs.get("gradient_accumulation_steps", 1 if kind == "accelerator" else None))
        window = steps if isinstance(steps, int) and steps > 1 else ACCUMULATION if isinstance(steps, Unknown) else 1
        half = settled(kwargs.get("mixed_precision", kwargs.get("precision"))) in ("fp16", "16-mixed", 16, "16")
        return state.make("framework", node, framework=kind, window=window, count=0, sync=True, scales=half)

    return handler


def call(state: Calls, thing: Thing, name: str, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    """A method of an Accelerator or a Fabric."""
    handler = METHODS.get(name)
    if handler is not None:
        return handler(state, thing, args, kwargs, node)
    if name in ("autocast",):
        return state.make("context", None, what="null")
    if name in ("all_reduce", "all_gather", "gather", "gather_for_metrics", "reduce", "pad_across_processes"):
        value = settled(args[0]) if args else None
        if isinstance(value, Tensor):
            value.tags |= {"synced"}
        return value
    return Unknown(f"{thing.name}.{name}()")


def _prepare(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    for value in args:
        held = settled(value)
        if isinstance(held, Unknown):
            kind = _kind_by_name(held.name)
            held = state.promote(held, kind) if kind else held
        target = model_of(held) or (held if isinstance(held, Thing) else None)
        if target is not None:
            target.facts["prepared by"] = thing
            target.escaped = target.kind in ("loader", "sampler")
    return tuple(args) if len(args) != 1 else args[0]


def _kind_by_name(name: str) -> str | None:
    if re.search(r"sched", name, re.I):
        return "scheduler"
    if re.search(r"opt", name, re.I):
        return "optimizer"
    if re.search(r"load|_dl$", name, re.I):
        return "loader"
    return "model" if re.search(r"model|net", name, re.I) else None


def _setup(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    return _prepare(state, thing, args, kwargs, node)


def _backward(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    value = settled(args[0]) if args else None
    if isinstance(value, Tensor):
        window = thing.facts.get("window", 1)
        if isinstance(window, int) and window > 1:
            value.divisors = (*value.divisors, Divisor(float(window), frozenset({"accum", "framework"}), state.place(node)))
        say_backward(state, value, node, by_framework=True)
        thing.facts["scaled"] = thing.facts.get("scales", False)
    return None


def _unscale(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    thing.facts["scaled"] = False
    return None


def scaled_inside(owners: set[Thing]) -> bool:
    """Whether a framework has multiplied the gradients of these models by its loss scale."""
    frameworks = (t.facts.get("prepared by") for owner in owners for t in owner.family())
    return any(isinstance(f, Thing) and bool(f.facts.get("scaled")) for f in frameworks)


def say_backward(state: Calls, loss: Tensor, node: ast.AST, by_framework: bool = False) -> None:
    """Gradients of a loss are added."""
    half = {m for m in loss.models if _dtype(m) == "float16" and not m.facts.get("partly frozen")}
    state.emit(
        Backward,
        node,
        optimizers=Reach(loss.models),
        models=tuple(loss.models),
        scaler=loss.scaler,
        divisors=loss.divisors,
        reduction=loss.reduction,
        region=state.region,
        forward_regions=loss.regions,
        in_no_sync=bool(state.no_sync),
        forward_in_no_sync=loss.no_sync,
        ddp=tuple(loss.ddp),
        bypassed=loss.bypassed,
        scaled_penalty=loss.penalty,
        eval_mode=tuple(loss.eval_models),
        retained=loss.retained,
        half_params=tuple(m for m in half if not half & (m.family() - {m})),
        by_framework=by_framework,
    )
    reached = {m for model in loss.models for m in model.family()}
    for param, hook, at in state.memo.get("gradient edits", []) if loss.scaler is not None else ():
        code = hook.node if isinstance(hook, Function) else None
        if code is not None and re.search(r"clamp|clip", ast.unparse(code)) and any(reached & o.family() for o in param.owners):
            optimizers = Reach(frozenset(param.owners))
            state.emit(Clip, at, optimizers=optimizers, kind="value", exhausted=False, partial=False)
    for param, hook in state.memo.get("gradient hooks", []):
        if any(reached & owner.family() for owner in param.owners):
            state.call(hook, [param], {}, node)


def say_divided_backward(state: Calls, loss: Tensor, node: ast.AST) -> None:
    """Gradients of a loss are added by code that divides by the window's size itself."""
    by = Divisor(None, frozenset({"framework"}), state.place(node))
    say_backward(state, derive(loss, divisors=(*loss.divisors, by)), node, by_framework=True)


def _dtype(model: Thing) -> str | None:
    inner = model.facts.get("inner")
    return model.dtype or (_dtype(inner) if isinstance(inner, Thing) else None)


def _clip(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    params = [a for a in args if isinstance(settled(a), (Thing, list, tuple)) or model_of(a) is not None]
    owners, _whole, gone = params_of(state, params)
    if thing.facts.get("framework") == "accelerator":
        thing.facts["clipped"] = True
    thing.facts["scaled"] = False
    state.emit(Clip, node, optimizers=Reach(frozenset(owners)), kind="framework", exhausted=gone, partial=False)
    return Tensor(dtype="float", tags=frozenset({"data"}), name="norm")


def _accumulate(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    return state.make("context", None, what="accumulate", framework=thing)


def enter_accumulate(state: Calls, context: Thing) -> Callable[[], None]:
    """`with accelerator.accumulate(model)`: decide whether this micro-batch synchronises."""
    thing = context.facts["framework"]
    thing.facts["count"] = thing.facts.get("count", 0) + 1
    window = thing.facts.get("window", 1)
    last = bool(state.loops) and state.loops[-1].index == state.turns_here - 1
    thing.facts["sync"] = last or thing.facts["count"] % window == 0
    thing.facts["inside"] = True
    if last:
        thing.facts["count"] = 0

    def leave() -> None:
        thing.facts["inside"] = False

    return leave


def suspended(thing: Thing) -> bool:
    """Whether a prepared optimizer does nothing now, because the window is not complete."""
    framework = thing.facts.get("prepared by")
    return isinstance(framework, Thing) and bool(framework.facts.get("inside")) and framework.facts.get("sync") is False


def _no_sync(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    enabled = kwargs.get("enabled", True)
    on = state.truth(enabled, node)
    return state.make("context", None, what="no_sync" if on else "null", model=model_of(args[0]) if args else None)


def _first(state: Calls, thing: Thing, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    return args[0] if args else None


METHODS: dict[str, Callable[..., Value]] = {
    "prepare": _prepare,
    "prepare_model": _first,
    "prepare_data_loader": _first,
    "setup": _setup,
    "setup_module": _setup,
    "setup_optimizers": _setup,
    "setup_dataloaders": _setup,
    "backward": _backward,
    "manual_backward": _backward,
    "clip_grad_norm_": _clip,
    "clip_grad_value_": _clip,
    "clip_gradients": _clip,
    "accumulate": _accumulate,
    "unscale_gradients": _unscale,
    "no_sync": _no_sync,
    "no_backward_sync": _no_sync,
    "unwrap_model": _first,
}
"""Methods of Accelerator and Fabric."""


def _deepspeed(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    model = model_of(kwargs.get("model", args[1] if len(args) > 1 else None))
    engine = state.make("engine", node, model=model)
    optimizer = state.make("optimizer", None, name="engine", given=True)
    optimizer.owners = {model} if model is not None else set()
    engine.facts["optimizer"] = optimizer
    return (engine, optimizer, Unknown("loader"), Unknown("scheduler"))


def call_engine(state: Calls, engine: Thing, name: str, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    """A method of a DeepSpeed engine: clearing, clipping and windows are its own affair."""
    if name == "backward" and args and isinstance(settled(args[0]), Tensor):
        say_divided_backward(state, settled(args[0]), node)
    return Unknown(f"{engine.name}.{name}()")


def lightning(state: Calls, instance: Value, name: str, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    """A method that a Lightning module inherits."""
    if name in ("optimizers", "lr_schedulers"):
        return _configured(state, instance, name, node)
    if name == "manual_backward":
        value = settled(args[0]) if args else None
        if isinstance(value, Tensor):
            say_backward(state, value, node, by_framework=True)
        return None
    if name == "save_hyperparameters":
        settings = Unknown("hparams")
        for key, value in state.scope.names.items():
            settings.children[f".{key}"] = settings.children[f"[{key!r}]"] = value
        instance.attrs["hparams"] = settings
    if name == "clip_gradients":
        optimizer = settled(args[0]) if args else None
        owners = set(optimizer.owners) if isinstance(optimizer, Thing) else set()
        state.emit(Clip, node, optimizers=Reach(frozenset(owners)), kind="framework", exhausted=False, partial=False)
    return None


def _configured(state: Calls, instance: Value, name: str, node: ast.AST) -> Value:
    key = ("lightning", id(instance))
    if key not in state.memo:
        method = instance.cls.lookup("configure_optimizers")
        state.memo[key] = settled(state.call_function(method, [instance], {}, node)) if method is not None else None
    made = state.memo[key]
    found = [t for t in _things(made) if t.kind == ("optimizer" if name == "optimizers" else "scheduler")]
    return found[0] if len(found) == 1 else found if found else Unknown(name)


def _things(value: Value, depth: int = 0) -> list[Thing]:
    value = settled(value)
    if isinstance(value, Thing):
        return [value]
    if isinstance(value, dict) and depth < 4:
        return [t for v in value.values() for t in _things(v, depth + 1)]
    if isinstance(value, (list, tuple)) and depth < 4:
        return [t for v in value for t in _things(v, depth + 1)]
    return []


TABLE: dict[str, Callable[..., Value]] = {"deepspeed.initialize": _deepspeed}
"""Handlers by path."""
PATTERNS: tuple[tuple[re.Pattern[str], Callable[..., Value]], ...] = (
    (re.compile(r"(^|\.)Accelerator$"), _framework("accelerator")),
    (re.compile(r"^lightning(_fabric)?(\.\w+)*\.Fabric$"), _framework("fabric")),
)
"""Handlers by pattern of the path."""
