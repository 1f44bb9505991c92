"""The standard library and its like, as far as training loops use them."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from halfstep.events.vocabulary import MemoryFlush, Seed
from halfstep.imagine.arithmetic import arithmetic
from halfstep.imagine.library import python
from halfstep.imagine.library.python import read_on_host
from halfstep.imagine.naming import MODEL, hinted
from halfstep.imagine.state import Exited
from halfstep.imagine.values import Instance, Partial, Tensor, Thing, Unknown, Value, model_of, settled, tagged, tags_of

if TYPE_CHECKING:
    from halfstep.imagine.calls import Calls

Args = list[Value]
Kwargs = dict[str, Value]


def _partial(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    return Partial(args[0], args[1:], kwargs) if args else Unknown("partial")


def _deepcopy(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    value = settled(args[0]) if args else None
    if isinstance(value, Unknown) and MODEL.search(value.name):
        value = state.promote(value, "model")
    model = model_of(value)
    if model is None and isinstance(value, Instance) and value.thing is None:
        return Instance(value.cls, dict(value.attrs))
    if model is None:
        return list(value) if type(value) is list else dict(value) if type(value) is dict else value
    copied = state.make("model", node, copy_of=model)
    copied.training, copied.dtype, copied.device = model.training, model.dtype, model.device
    copied.facts.update({k: v for k, v in model.facts.items() if k not in ("inner", "wrapper")})
    copied.facts["copy_of"] = model
    if isinstance(value, Instance):
        twin = Instance(value.cls, dict(value.attrs), copied)
        copied.facts["instance"] = twin
        return twin
    return copied


def _field(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    """A field of a dataclass: its default, or what makes it."""
    return Partial(kwargs["default_factory"], [], {}) if "default_factory" in kwargs else kwargs.get("default", Unknown("field"))


def _as_dict(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    """What an object holds, by name; `asdict` does so for the objects in it too."""
    value = settled(args[0]) if args else None
    if not isinstance(value, Instance):
        return Unknown("fields", tags_of(args))
    deep = path.endswith("asdict")
    held = ((k, settled(v)) for k, v in value.attrs.items())
    return {k: _as_dict(state, node, [v], {}, path) if deep and isinstance(v, Instance) else v for k, v in held}


def _replace(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    """A copy of a dataclass with other values in some of its fields."""
    value = settled(args[0]) if args else None
    named = {key: hinted(key, new) for key, new in kwargs.items()}
    return Instance(value.cls, {**value.attrs, **named}) if isinstance(value, Instance) else Unknown("copy", tags_of(args))


def _math(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    value = settled(args[0]) if args else 0
    name = path.rsplit(".", 1)[-1]
    if name in ("isfinite", "isnan", "isinf"):
        tags = tags_of(value)
        if isinstance(value, (int, float)) and "scale" not in tags:
            return getattr(math, name)(value)
        return Unknown(
            f"{name}({getattr(value, 'name', 'value')})",
            tags | {"data"},
            normal=name == "isfinite",
            loaders=getattr(value, "loaders", frozenset()),
        )
    if isinstance(value, (int, float)) and len(args) == 1 and hasattr(math, name):
        try:
            return tagged(getattr(math, name)(value), tags_of(value))
        except (ValueError, OverflowError, TypeError):
            return Unknown(name, tags_of(value))
    if isinstance(value, Tensor):
        return read_on_host(state, value, node, name)
    return Unknown(f"{name}({getattr(value, 'name', '?')})", tags_of(args))


def _collect(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    state.emit(MemoryFlush, node, kind="gc.collect")
    return 0


def _seed(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    state.emit(
        Seed, node, constant=is_constant(args[0] if args else next(iter(kwargs.values()), None)), in_worker=state.in_worker
    )
    return None


def is_constant(seed: Value) -> bool:
    """Whether a seed is the same wherever and whenever it is used."""
    made = isinstance(seed, Unknown) and "seed" in seed.name and "()" in seed.name
    return seed is not None and not made and not tags_of(seed) & {"rank", "worker", "data"}


def _exit(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    raise Exited


def _defaultdict(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    table = state.make("context", None, what="defaultdict", factory=args[0] if args else None)
    table.kind = "defaultdict"
    return table


def _environ_get(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    return environment(args[0] if args else None)


def environment(name: Value) -> Value:
    """A variable of the environment."""
    text = name if isinstance(name, str) else "?"
    if text in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK"):
        return Unknown("rank" if text == "RANK" else "local_rank", frozenset({"rank"}))
    if text == "WORLD_SIZE":
        return tagged(2, frozenset({"world"}))
    return Unknown(f"${text}")


def _simple_namespace(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    made = Unknown("args")
    made.children.update({f".{key}": hinted(key, value) for key, value in kwargs.items()})
    return made


def _divmod(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    left, right = [*(settled(a) for a in args), Unknown("?"), Unknown("?")][:2]
    return tuple(arithmetic(state, left, op, right, node) for op in (ast.FloorDiv(), ast.Mod()))


def _remainder(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    return _divmod(state, node, args, kwargs, path)[1]


def _parser(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    made = state.make("context", None, what="parser")
    made.kind = "parser"
    made.facts["options"] = {}
    return made


def _chain(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    values = [settled(a) for a in args]
    if values and all(isinstance(v, Thing) and v.kind == "params" for v in values):
        made = state.make("params", None)
        made.owners, made.facts["generator"] = {owner for v in values for owner in v.owners}, True
        return made
    return [item for v in values for item in state.items(v, node)]


TABLE: dict[str, Callable[..., Value]] = {
    "itertools.chain": _chain,
    "builtins.divmod": _divmod,
    "operator.mod": _remainder,
    "math.fmod": _remainder,
    "builtins.exit": _exit,
    "builtins.quit": _exit,
    "sys.exit": _exit,
    "os._exit": _exit,
    "functools.partial": _partial,
    "copy.deepcopy": _deepcopy,
    "copy.copy": _deepcopy,
    "dataclasses.field": _field,
    "dataclasses.asdict": _as_dict,
    "dataclasses.replace": _replace,
    "builtins.vars": _as_dict,
    "collections.defaultdict": _defaultdict,
    "collections.OrderedDict": python.TABLE["builtins.dict"],
    "gc.collect": _collect,
    "random.seed": _seed,
    "numpy.random.seed": _seed,
    "torch.manual_seed": _seed,
    "torch.cuda.manual_seed": _seed,
    "torch.cuda.manual_seed_all": _seed,
    "torch.seed": _seed,
    "os.environ.get": _environ_get,
    "os.getenv": _environ_get,
    "argparse.ArgumentParser": _parser,
    "argparse.Namespace": _simple_namespace,
    "types.SimpleNamespace": _simple_namespace,
    **{f"time.{n}": lambda s, n, a, k, p: Unknown("time", frozenset({"data"})) for n in ("time", "monotonic", "perf_counter")},
    **{f"math.{name}": _math for name in ("ceil", "floor", "sqrt", "log", "exp", "cos", "sin", "isfinite", "isnan", "isinf")},
    **{f"numpy.{name}": _math for name in ("isfinite", "isnan", "isinf", "ceil", "floor")},
}
"""Handlers by path."""
