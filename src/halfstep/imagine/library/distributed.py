"""Process groups, collectives and DDP."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from halfstep.events.vocabulary import Collective, Made
from halfstep.imagine.values import Tensor, Thing, Unknown, Value, flat, model_of, settled, tagged, tags_of

if TYPE_CHECKING:
    from halfstep.imagine.calls import Calls

Args = list[Value]
Kwargs = dict[str, Value]
COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "barrier",
    "reduce_scatter",
    "all_to_all",
    "all_gather_into_tensor",
    "all_gather_object",
    "broadcast_object_list",
    "monitored_barrier",
    "reduce_scatter_tensor",
    "gather_object",
)


SYNCING = ("all_reduce", "broadcast", "all_gather", "reduce")
SYNCING_OBJECTS = ("broadcast_object_list", "all_gather_object")
"""Collectives after which all ranks hold the same in the list that is their first argument."""


def _init(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    backend = args[0] if args else kwargs.get("backend")
    state.make("group", node, backend=backend if isinstance(backend, str) else None)
    return None


def _rank(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    return Unknown("rank", frozenset({"rank"}))


def _world(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    return tagged(2, frozenset({"world"}))


def _collective(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    kind = path.rsplit(".", 1)[-1]
    exchanged = [v for v in flat(args[:2]) if (isinstance(v, Thing) and v.kind == "param") or "gradient" in tags_of(v)]
    averaged = bool(exchanged) and kind != "broadcast"
    state.emit(Collective, node, kind=kind, of_some=any(map(_is_part, [*args, kwargs.get("group")])), averages=averaged)
    table = settled(args[0]) if args else None
    if kind in SYNCING_OBJECTS and isinstance(table, list):
        for sent in (each for each in table if isinstance(each, Unknown)):
            sent.tags = (sent.tags - {"rank"}) | {"synced"}
        table[:] = [Unknown("agreed", frozenset({"data", "synced"})) for _ in table]
    for value in flat(args):
        if isinstance(value, (Tensor, Unknown)) and kind in SYNCING:
            value.tags = (value.tags - {"rank"}) | {"synced"}
    return None


def _is_part(value: Value) -> bool:
    """Whether a value is, or may be, a group that not all ranks belong to."""
    value = settled(value)
    return isinstance(value, Unknown) and not value.has_default and (value.name == "part of the ranks" or "group" in value.name)


def _new_group(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    """A group of ranks, of all where none are named: every rank must take part in making it."""
    state.emit(Collective, node, kind="new_group")
    ranks = settled(args[0] if args else kwargs.get("ranks"))
    whole = ranks is None or (isinstance(ranks, list) and {0, 1} <= {each for each in ranks if isinstance(each, int)})
    return None if whole else Unknown("part of the ranks")


def _ddp(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    value = args[0] if args else kwargs.get("module")
    inner = model_of(value)
    if inner is None:
        unknown = settled(value)
        if not isinstance(unknown, Unknown):
            return value
        promoted = state.promote(unknown, "model")
        assert isinstance(promoted, Thing)
        inner = promoted
    kind = "ddp" if path.endswith(("DistributedDataParallel", "DDP")) else "parallel"
    facts: dict[str, Value] = {
        "inner": inner,
        "wrapper": kind,
        "device_ids": kwargs.get("device_ids", args[1] if len(args) > 1 else None),
        "find_unused": kwargs.get("find_unused_parameters", False) is not False or kwargs.get("static_graph") is True,
        "mode_dependent": inner.facts.get("mode_dependent"),
        "module": value,
        "indexed": inner.facts.get("indexed device"),
        "device made": inner.facts.get("device made"),
    }
    made = state.make("model", node, **facts)
    made.training, made.device, made.dtype = inner.training, inner.device, inner.dtype
    inner.parents.append(made)
    return made


def _set_device(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    state.emit(Made, node, what=state.make("device choice", None), facts={})
    return None


def _spawn(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    func = args[0] if args else kwargs.get("fn")
    given = settled(kwargs.get("args", args[1] if len(args) > 1 else ()))
    rank = Unknown("rank", frozenset({"rank"}))
    result = state.call(func, [rank, *(given if isinstance(given, (tuple, list)) else [])], {}, node)
    state.make("spawn end", node)
    return result


def _available(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    return Unknown(path, frozenset({"device"}), default=True, has_default=True)


def _initialized(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    return any(t.kind == "group" for t in state.things) or Unknown(path, default=True, has_default=True)


def _device_count(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    return tagged(2, frozenset({"world"}))


def _join(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    state.make("join", node)
    return state.make("context", None, what="null")


TABLE: dict[str, Callable[..., Value]] = {
    "torch.distributed.init_process_group": _init,
    "torch.distributed.new_group": _new_group,
    "torch.distributed.get_rank": _rank,
    "torch.distributed.get_world_size": _world,
    "torch.distributed.is_initialized": _initialized,
    "torch.distributed.is_available": lambda s, n, a, k, p: True,
    "torch.nn.parallel.DistributedDataParallel": _ddp,
    "torch.nn.DataParallel": _ddp,
    "torch.nn.parallel.DataParallel": _ddp,
    "torch.cuda.set_device": _set_device,
    "torch.accelerator.set_device_index": _set_device,
    "torch.cuda.is_available": _available,
    "torch.backends.mps.is_available": lambda s, n, a, k, p: False,
    "torch.cuda.is_bf16_supported": lambda s, n, a, k, p: Unknown(p, frozenset({"device"}), default=True, has_default=True),
    "torch.cuda.device_count": _device_count,
    "torch.multiprocessing.spawn": _spawn,
    "torch.multiprocessing.start_processes": _spawn,
    "torch.distributed.algorithms.join.Join": _join,
    **{f"torch.distributed.{name}": _collective for name in COLLECTIVES},
}
"""Handlers by path."""
PATTERNS: tuple[tuple[re.Pattern[str], Callable[..., Value]], ...] = ((re.compile(r"(^|\.)FullyShardedDataParallel$"), _ddp),)
"""Handlers by pattern of the path."""
