"""Optimizers, schedulers, clipping, averages of weights."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from halfstep.events.vocabulary import Clip, Divisor, Mode, ModuleReplaced, ZeroGrad
from halfstep.imagine.library.formats import dtype_name
from halfstep.imagine.state import Reach
from halfstep.imagine.values import (
    NO_TAGS,
    Bound,
    Function,
    Instance,
    Partial,
    Scope,
    Tensor,
    Thing,
    Unknown,
    Value,
    flat,
    model_of,
    settled,
    tags_of,
)

if TYPE_CHECKING:
    from halfstep.imagine.calls import Calls

Args = list[Value]
Kwargs = dict[str, Value]


def params_of(state: Calls, value: Value, depth: int = 0) -> tuple[set[Thing], bool, bool]:
    """The models whose parameters a value holds; whether that is all of them; whether a generator was used up."""
    value = settled(value)
    if isinstance(value, Thing) and value.kind == "params":
        exhausted = bool(value.facts.get("generator")) and bool(value.facts.get("used"))
        if value.facts.get("generator"):
            value.facts["used"] = True
        return set(value.owners), not value.facts.get("part"), exhausted
    model = model_of(value)
    if model is not None:
        return {model}, True, False
    if isinstance(value, Thing) and value.kind == "param":
        return set(value.owners), depth > 1 and bool(value.facts.get("layer")), False
    if isinstance(value, Thing) and value.kind == "optimizer":
        return set(value.owners), True, False
    if isinstance(value, dict) and "params" in value:
        return params_of(state, value["params"], depth)
    if isinstance(value, (list, tuple)) and depth < 4:
        found: set[Thing] = set()
        whole, used = True, False
        for item in value[:64]:
            owners, all_of, gone = params_of(state, item, depth + 1)
            found |= owners
            whole, used = whole and all_of, used or gone
        return found, whole, used
    return set(), False, False


def _optimizer(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    params = args[0] if args else kwargs.get("params")
    owners, whole, _ = params_of(state, params)
    lr = kwargs.get("lr", args[1] if len(args) > 1 else None)
    groups = settled(params)
    rates = [group.get("lr", lr) for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    facts: dict[str, Value] = {"lr": lr, "rates": rates or [lr], "class": path.rsplit(".", 1)[-1], "whole": whole}
    made = state.make("optimizer", node, **facts)
    made.owners = owners
    asked = any(isinstance(v, Thing) and v.facts.get("asked") for v in flat([params]))
    made.facts["left out"] = {m for m in state.things if asked and _is_held(m) and owners & m.family()}
    made.facts["of copies"] = not owners and "copied weights" in tags_of(params)
    if isinstance(settled(params), Unknown) and not owners:
        made.facts["unknown params"] = True
    return made


def _is_held(model: Thing) -> bool:
    return model.kind == "model" and (model.facts.get("frozen") is True or model.facts.get("held back") is True)


def say_released(state: Calls, models: set[Thing], node: ast.AST) -> None:
    """Parameters get gradients again: optimizers that asked for those that have some were built without them."""
    for model in models:
        missing = tuple(t for t in state.things if any(m in model.family() or model in m.family() for m in _left_out(t)))
        if missing:
            state.emit(ModuleReplaced, node, model=model, module=model, optimizers=missing)


def _left_out(optimizer: Thing) -> set[Thing]:
    return optimizer.facts.get("left out", set()) if optimizer.kind == "optimizer" else set()


def _scheduler(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    name = path.rsplit(".", 1)[-1]
    args = args[1:] if args and isinstance(settled(args[0]), str) else args
    optimizer = settled(args[0] if args else kwargs.get("optimizer"))
    if isinstance(optimizer, Unknown):
        optimizer = state.promote(optimizer, "optimizer")
    optimizer = optimizer.thing if isinstance(optimizer, Instance) else optimizer
    optimizer = optimizer if isinstance(optimizer, Thing) else None
    rest = args[1:]
    parts = [v for v in _flat([*rest, *kwargs.values()]) if isinstance(v, Thing) and v.kind == "scheduler"]
    facts = dict(zip(_PARAMETERS.get(name, ()), rest, strict=False)) | kwargs
    site = state.stack[-1] if state.stack else None
    known: dict[str, Value] = {"class": name, "optimizer": optimizer, "args": facts, "site": site, "text": _worded(node)}
    made = state.make("scheduler", node, **known)
    for part in parts:
        part.facts["part of"] = made
    if isinstance(optimizer, Thing):
        made.facts["optimizer"] = optimizer
    made.facts["horizon"] = _horizon(state, name, facts, rest)
    if name in ("LambdaLR", "MultiplicativeLR"):
        _ask_lambda(state, made, facts, rest, optimizer, node)
    return made


_PARAMETERS = {
    "StepLR": ("step_size", "gamma"),
    "MultiStepLR": ("milestones", "gamma"),
    "CosineAnnealingLR": ("T_max", "eta_min"),
    "ExponentialLR": ("gamma",),
    "OneCycleLR": ("max_lr", "total_steps", "epochs", "steps_per_epoch"),
    "LinearLR": ("start_factor", "end_factor", "total_iters"),
    "PolynomialLR": ("total_iters", "power"),
    "LambdaLR": ("lr_lambda",),
    "ReduceLROnPlateau": ("mode", "factor", "patience"),
    "CosineAnnealingWarmRestarts": ("T_0", "T_mult"),
    "get_linear_schedule_with_warmup": ("num_warmup_steps", "num_training_steps"),
    "get_cosine_schedule_with_warmup": ("num_warmup_steps", "num_training_steps"),
    "get_polynomial_decay_schedule_with_warmup": ("num_warmup_steps", "num_training_steps"),
}
_HORIZON = ("T_max", "total_steps", "num_training_steps", "total_iters", "step_size", "milestones")


def _horizon(state: Calls, name: str, facts: dict[str, Value], rest: Args) -> frozenset[str]:
    """What the scheduler's length counts."""
    found = NO_TAGS
    for key in _HORIZON:
        found |= tags_of(settled(facts.get(key)))
    if name == "OneCycleLR" and "steps_per_epoch" in facts:
        found |= tags_of(settled(facts["steps_per_epoch"])) | tags_of(settled(facts.get("epochs"))) | {"loader", "epochs"}
    if name == "LambdaLR":
        for value in _flat([*rest, *facts.values()]):
            if isinstance(value, Function):
                found |= _captured(value)
    return found


def _worded(node: ast.AST) -> str:
    """What the program calls the numbers that it gives to a scheduler."""
    given = [*node.args[1:], *(k.value for k in node.keywords)] if isinstance(node, ast.Call) else []
    return " ".join(map(ast.unparse, given))[:200]


def _captured(function: Function) -> frozenset[str]:
    names = {n.id for n in ast.walk(function.node) if isinstance(n, ast.Name)}
    scope: Scope | None = function.scope
    found = NO_TAGS
    while scope is not None and not scope.is_class and scope is not function.module.scope:
        for name in names & set(scope.names):
            if re.search(r"total|training|max|num|t_|steps|n_", name, re.I):
                found |= tags_of(settled(scope.names[name]))
        scope = scope.outer
    return found


def _flat(values: Args) -> Args:
    found: Args = []
    for value in values:
        value = settled(value)
        if isinstance(value, (list, tuple)):
            found.extend(settled(v) for v in value)
        else:
            found.append(value)
    return found


SAMPLED_STEPS = (0, 1, 2, 5, 10, 30, 100, 300, 1000, 3000, 10_000)
"""Steps at which a schedule is asked: enough of them that one lies near its peak."""


def _ask_lambda(state: Calls, made: Thing, facts: dict[str, Value], rest: Args, optimizer: Value, node: ast.AST) -> None:
    """Call the schedule with some steps: is its peak the learning rate itself?"""
    rates = optimizer.facts.get("rates", []) if isinstance(optimizer, Thing) else []
    asked = [v for v in _flat([*rest, facts.get("lr_lambda")]) if isinstance(v, (Function, Bound, Partial, Instance))]
    paired = zip(asked, rates, strict=True) if len(asked) == len(rates) else ((v, lr) for v in asked for lr in rates)
    for value, lr in paired:
        if lr is None:
            continue
        results = [settled(state.call(value, [step], {}, node)) for step in SAMPLED_STEPS]
        known = [r for r in results if isinstance(r, (int, float))]
        if isinstance(lr, float) and 0 < lr < 0.5 and len(known) > 2 and lr / 2 < max(known) <= lr * 1.0001:
            made.facts["absolute"] = True
        if isinstance(lr, Unknown) and all(isinstance(r, Unknown) and lr.name in r.factors for r in results):
            made.facts["absolute"] = True


def _clip(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    params = args[0] if args else kwargs.get("parameters")
    limits = [*args[1:2], *(kwargs.get(name) for name in ("max_norm", "clip_value"))]
    kind = "scaled" if "scale" in tags_of(limits) else "value" if "value" in path else "norm"
    return clip(state, params, kind, node)


def clip(state: Calls, params: Value, kind: str, node: ast.AST) -> Tensor:
    """Clip the gradients of parameters."""
    from halfstep.imagine.library.frameworks import scaled_inside

    owners, whole, exhausted = params_of(state, params)
    facts: dict[str, Value] = {"exhausted": exhausted, "partial": not whole and bool(owners), "scaled": scaled_inside(owners)}
    state.emit(Clip, node, optimizers=Reach(frozenset(owners)), kind=kind, **facts)
    return Tensor(dtype="float", tags=frozenset({"data", "gradnorm"}), name="norm")


def factor(state: Calls, name: str, by: Value, node: ast.AST) -> Divisor | None:
    """What gradients are divided by, or multiplied: numbers that do not depend on them leave a loss scale what it is."""
    if not re.search("div|mul", name) or ("mul" in name and tags_of(by) & {"gradient", "gradnorm"}):
        return None
    part = "div" in name or (isinstance(by, float) and by < 1)
    value = float(by) if "div" in name and isinstance(by, (int, float)) else None
    return Divisor(value, tags_of(by) if part else NO_TAGS, state.place(node))


def edit_gradients(state: Calls, owners: set[Thing], divisor: Divisor | None, node: ast.AST, kind: str = "") -> None:
    """Gradients are rewritten by hand."""
    kind = "divide" if divisor else kind or "edit"
    state.emit(Clip, node, optimizers=Reach(frozenset(owners)), kind=kind, divisor=divisor)


def _clear(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    """A function of a library that clears the gradients of what it is given."""
    owners = set[Thing]().union(*(params_of(state, value)[0] for value in [*args, *kwargs.values()]))
    state.emit(ZeroGrad, node, optimizers=Reach(frozenset(owners)))
    return None


def _average(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    model = model_of(args[0]) if args else None
    return state.make("average", node, of=model)


def _pretrained(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    facts: dict[str, Value] = {"class": path.rsplit(".", 1)[0]}
    made = state.make("model", node, **facts)
    dtype = dtype_name(kwargs.get("torch_dtype", kwargs.get("dtype")))
    if dtype in ("float16", "bfloat16"):
        made.dtype = dtype
        made.facts["cast at"] = state.place(node)
    made.facts["frozen"] = None
    return made


def switch(state: Calls, thing: Thing, training_mode: bool, node: ast.AST) -> None:
    """A model and what it holds or is wrapped in change to training or evaluation."""
    for other in state.things:
        inner = other.facts.get("inner")
        if other.kind == "model" and (thing in other.family() or inner is thing):
            other.training = training_mode
    state.emit(Mode, node, model=thing, training=training_mode)


TABLE: dict[str, Callable[..., Value]] = {
    "torch.nn.utils.clip_grad_norm_": _clip,
    "torch.nn.utils.clip_grad_norm": _clip,
    "torch.nn.utils.clip_grad_value_": _clip,
    "torch.nn.utils.clip_grads_with_norm_": _clip,
}
"""Handlers by path."""
PATTERNS: tuple[tuple[re.Pattern[str], Callable[..., Value]], ...] = (
    (re.compile(r"(^|\.)(zero|clear|reset)_?grad(s|ients?)?$"), _clear),
    (re.compile(r"(lr_scheduler\.[A-Z]\w+|swa_utils\.SWALR)$"), _scheduler),
    (re.compile(r"(^|\.)get_(\w+_)?schedule(r)?(_with\w*)?$"), _scheduler),
    (re.compile(r"(^|\.)(AveragedModel|ModelEma\w*|EMA|ExponentialMovingAverage|EMAModel)$"), _average),
    (re.compile(r"^torch\.optim\.(\w+\.)?[A-Z]\w+$"), _optimizer),
    (
        re.compile(r"(^|\.)(Fused)?(Adam\w*|SGD\w*|Lion\w*|LAMB|Lamb|Adafactor|Muon|Shampoo|SOAP|RAdam|Prodigy|AdEMAMix)$"),
        _optimizer,
    ),
    (re.compile(r"(^|\.)(Auto\w*Model\w*|\w+For\w+|\w+Model|\w+Pipeline)\.from_(pretrained|config)$"), _pretrained),
    (re.compile(r"^torchvision\.models\.\w+"), _pretrained),
    (re.compile(r"(^|\.)(timm\.create_model|create_model|torch\.hub\.load)$"), _pretrained),
)
"""Handlers by pattern of the path."""
