"""Attributes of library objects, and what setting them means."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from halfstep.events.vocabulary import Backward, GradRead, NoSyncEnter, NoSyncExit, SetEpoch, ZeroGrad
from halfstep.imagine.library import formats, frameworks, training
from halfstep.imagine.library.stdlib import environment
from halfstep.imagine.naming import MAIN, hinted
from halfstep.imagine.state import Reach
from halfstep.imagine.values import (
    Bound,
    Class,
    External,
    Function,
    Instance,
    Tensor,
    Thing,
    Unknown,
    Value,
    derive,
    model_of,
    settled,
)

if TYPE_CHECKING:
    from halfstep.imagine.calls import Calls

ROLE_METHODS = frozenset(
    [
        "accumulate",
        "add_param_group",
        "append",
        "backward",
        "bfloat16",
        "buffers",
        "children",
        "clip_grad_norm_",
        "cpu",
        "cuda",
        "detach",
        "eval",
        "extend",
        "float",
        "get",
        "get_scale",
        "half",
        "item",
        "items",
        "join",
        "keys",
        "load_state_dict",
        "lr_schedulers",
        "manual_backward",
        "masked_fill",
        "module",
        "modules",
        "named_parameters",
        "no_sync",
        "numpy",
        "optimizers",
        "parameters",
        "prepare",
        "register_comm_hook",
        "requires_grad_",
        "scale",
        "set_epoch",
        "state_dict",
        "step",
        "to",
        "tolist",
        "train",
        "unscale_",
        "unwrap_model",
        "update",
        "values",
        "zero_grad",
    ]
)
LIGHTNING = frozenset(
    {
        "optimizers",
        "lr_schedulers",
        "manual_backward",
        "clip_gradients",
        "log",
        "log_dict",
        "save_hyperparameters",
        "toggle_optimizer",
        "untoggle_optimizer",
    }
)


def read(state: Calls, value: Value, name: str, node: ast.AST) -> Value:
    """An attribute of a library object, tensor or unknown value."""
    if isinstance(value, External):
        known = getattr(math, name) if name in ("pi", "e", "inf") and value.path in ("math", "numpy", "np", "torch") else None
        return External(f"{value.path}.{name}") if known is None else known
    if isinstance(value, Tensor):
        return _of_tensor(state, value, name, node)
    if isinstance(value, Thing):
        return _of_thing(state, value, name, node)
    if isinstance(value, Unknown):
        return _of_unknown(state, value, name, node)
    return Bound(value, name)


def is_framework_method(cls: Class, name: str) -> bool:
    """Whether a Lightning module inherits this method."""
    return name in LIGHTNING and cls.is_a("LightningModule")


def _of_tensor(state: Calls, value: Tensor, name: str, node: ast.AST) -> Value:
    if name in ("shape", "ndim"):
        return Unknown(name, frozenset({"batch size"}))
    if name == "grad":
        if value.models or value.name == "parameter":
            last = next((d for d in reversed(state.drafts) if d.kind is Backward), None)
            scaler = last.fields["scaler"] if last is not None and not value.models else None
            return derive(_gradient(state, set(value.models), node), scaler=scaler, name="gradient")
        return Unknown("grad")
    if name == "data":
        return derive(value, grad=False)
    if name == "dtype":
        return Unknown(f"{value.dtype}.dtype" if value.dtype else "dtype")
    if name == "device":
        return Unknown("tensor.device")
    if name == "loss" and value.grad:
        return value if value.reduction else derive(value, reduction="mean", tags=value.tags | {"mean by name"})
    if name in ("loss", "logits", "values", "indices", "T", "mT", "real", "sample", "last_hidden_state", "pooler_output", "mH"):
        return Bound(value, name) if name in ("values", "indices") and value.loaders and not value.grad else derive(value)
    if name == "requires_grad":
        return value.grad
    return Bound(value, name)


def _gradient(state: Calls, owners: set[Thing], node: ast.AST) -> Tensor:
    grad = Tensor(dtype=None, tags=frozenset({"data", "gradient"}), models=frozenset(owners), name="gradient")
    state.emit(GradRead, node, optimizers=Reach(frozenset(owners)))
    return grad


def _of_thing(state: Calls, value: Thing, name: str, node: ast.AST) -> Value:
    if name in value.attrs:
        return value.attrs[name]
    if value.kind == "model":
        return _of_model(state, value, name, node)
    if value.kind == "param":
        return _of_param(state, value, name, node)
    if value.kind == "super":
        return _of_super(value, name)
    if value.kind == "loader" and name in ("sampler", "batch_sampler", "dataset"):
        return _part_of_loader(state, value, name)
    if value.kind == "framework":
        return _of_framework(state, value, name)
    if value.kind == "device" and name == "type":
        return value.facts.get("type") or Unknown("device.type")
    if value.kind == "optimizer" and name == "param_groups":
        group = {"lr": Unknown("lr", factors=frozenset({"lr"})), "params": _params(state, {*value.owners} or {value})}
        state.memo["group of", id(group)], state.memo["alive", id(group)] = value, group
        return [group]
    if value.kind == "engine" and value.facts.get("model") is not None and name == "module":
        return value.facts["model"]
    if value.kind in ("namespace", "parser") and name not in (
        "add_argument",
        "parse_args",
        "parse_known_args",
        "add_argument_group",
        "set_defaults",
    ):
        return Unknown(f"{value.name}.{name}")
    return Bound(value, name)


def _of_model(state: Calls, value: Thing, name: str, node: ast.AST) -> Value:
    inner = value.facts.get("inner")
    if name == "module" and isinstance(inner, Thing):
        return value.facts.get("module", inner)
    if name in ("training",):
        return value.training if value.training is not None else Unknown(f"{value.name}.training")
    if name in ROLE_METHODS or name in (
        "forward",
        "apply",
        "compile",
        "share_memory",
        "gradient_checkpointing_enable",
        "double",
        "type",
        "add_module",
        "register_module",
    ):
        return Bound(value, name)
    if name in ("weight", "bias"):
        param = state.make("param", None)
        param.owners = {value}
        return param
    instance = value.facts.get("instance")
    if isinstance(instance, Instance):
        method = instance.cls.lookup(name)
        if name in instance.attrs:
            return instance.attrs[name]
        if isinstance(method, Function):
            return Bound(instance, name, method)
    made = Unknown(f"{value.name or 'model'}.{name}", owner=value)
    return value.attrs.setdefault(name, hinted(name, made))


def _of_param(state: Calls, value: Thing, name: str, node: ast.AST) -> Value:
    if name == "grad":
        return _gradient(state, set(value.owners), node)
    if name == "requires_grad":
        value.facts["asked"] = True
        return not (value.facts.get("layer") and all(owner.facts.get("partly frozen") for owner in value.owners))
    if name == "data":
        return value
    return Bound(value, name)


def _of_super(value: Thing, name: str) -> Value:
    cls, instance = value.facts.get("cls"), value.facts.get("instance")
    if isinstance(cls, Class):
        for base in cls.bases:
            if isinstance(base, Class):
                found = base.lookup(name)
                if isinstance(found, Function):
                    return Bound(instance, name, found)
    if isinstance(instance, Instance) and instance.thing is not None and name != "__init__":
        return Bound(instance.thing, name)
    return Bound(value, name)


def _part_of_loader(state: Calls, value: Thing, name: str) -> Value:
    part = value.facts.get(name)
    if part is None or isinstance(part, Unknown):
        name = f"own {name}"
        part = value.facts.get(name)
    if part is None:
        kind = "dataset" if name == "own dataset" else "sampler"
        part = state.make(kind, None, name=f"{value.name}.{name[4:]}", given=True, plain=kind == "sampler")
        value.facts[name] = part
    instance = part.facts.get("instance") if isinstance(part, Thing) else None
    return instance or part


def _of_framework(state: Calls, value: Thing, name: str) -> Value:
    if name == "sync_gradients":
        return bool(value.facts.get("sync", True))
    if MAIN.search(name):
        return Unknown(name, frozenset({"main"}))
    if name == "device":
        return state.make("device", None, type="cuda")
    if name in ("num_processes", "world_size"):
        return hinted("world_size", 2)
    if name in ("process_index", "local_process_index", "global_rank", "local_rank"):
        return Unknown("rank", frozenset({"rank"}))
    if name == "gradient_accumulation_steps":
        return hinted("gradient_accumulation_steps", value.facts.get("window", 1))
    return Bound(value, name)


def _of_unknown(state: Calls, value: Unknown, name: str, node: ast.AST) -> Value:
    child = value.children.get(f".{name}")
    if child is not None:
        return child
    if name in ROLE_METHODS or (name in ("shape",) and value.loaders):
        return Bound(value, name)
    if name == "param_groups":
        return read(state, state.promote(value, "optimizer"), name, node)
    if MAIN.search(name):
        made = Unknown(name, frozenset({"main"}))
    else:
        made = Unknown(
            f"{value.name}.{name}", value.tags & {"data", "worker", "rank", "synced"}, owner=value.owner, loaders=value.loaders
        )
        made.normal = value.normal
        if value.name in ("os.environ",):
            made = environment(name)
    guessed = hinted(name, made)
    value.children[f".{name}"] = guessed
    return guessed


def _params(state: Calls, owners: set[Thing]) -> Thing:
    made = state.make("params", None)
    made.owners = owners
    return made


def write(state: Calls, thing: Thing, name: str, new: Value, node: ast.AST) -> None:
    """What setting an attribute of a library object means."""
    if name == "grad" and new is None and thing.kind == "param":
        one_of_many = bool(thing.facts.get("picked") or thing.facts.get("layer"))
        state.emit(ZeroGrad, node, optimizers=Reach(frozenset(thing.owners)), partial=one_of_many)
    elif name == "grad" and thing.kind == "param" and isinstance(new, Tensor) and "gradient" in new.tags:
        training.edit_gradients(state, thing.owners, new.divisors[-1] if new.divisors else None, node)
    elif name == "grad" and thing.kind == "param":
        training.edit_gradients(state, thing.owners, None, node, "set")
    elif name == "requires_grad" and thing.kind == "param":
        for owner in thing.owners:
            owner.facts["held back"] = new is False
            owner.facts["frozen"] = owner.facts.get("frozen") if new is not True else False
            if new is not True or not thing.facts.get("layer"):
                owner.facts["partly frozen"] = True
        if new is True:
            training.say_released(state, thing.owners, node)
    elif name == "data" and thing.kind == "param":
        formats.write_param(state, thing, node, new)
    elif name == "require_backward_grad_sync" and thing.kind == "model":
        on = state.truth(new, node)
        if not on and not state.no_sync:
            state.no_sync.append(thing)
            state.emit(NoSyncEnter, node, model=thing)
        elif on and state.no_sync:
            state.no_sync.clear()
            state.emit(NoSyncExit, node, model=thing)
    elif name == "last_epoch" and thing.kind == "scheduler":
        thing.facts["placed"] = True
    elif name == "training" and thing.kind == "model":
        training.switch(state, thing, state.truth(new, node), node)
    elif thing.kind == "dataset" and "epoch" in name:
        state.emit(SetEpoch, node, target=thing, value=state.number("value"))


def item(state: Calls, thing: Thing, key: Value, node: ast.AST) -> Value:
    """An item of a library object."""
    if thing.kind == "defaultdict":
        table = thing.facts.setdefault("table", {})
        name = key if isinstance(key, (str, int)) else "?"
        if name not in table:
            factory = thing.facts.get("factory")
            table[name] = state.call(factory, [], {}, node) if factory is not None else None
        return table[name]
    layers = thing.facts.get("layers")
    if isinstance(layers, list) and isinstance(key, int) and -len(layers) <= key < len(layers):
        return layers[key]
    if thing.kind == "dataset":
        return Unknown(f"{thing.name}[]", frozenset({"batch"}))
    if thing.kind == "state":
        return thing
    if thing.kind == "engine":
        return thing
    return Unknown(f"{thing.name}[{key!r}]"[:60])


def open_accumulation(state: Calls, context: Thing, node: ast.AST) -> Callable[[], None]:
    """Enter `accelerator.accumulate(...)`."""
    return frameworks.enter_accumulate(state, context)


def model_in(value: Value) -> Thing | None:
    """The model behind a value."""
    return model_of(settled(value))


__all__ = ["is_framework_method", "item", "model_in", "open_accumulation", "read", "write"]
