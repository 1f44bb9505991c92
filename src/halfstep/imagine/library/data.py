"""Data sets, loaders and samplers; what happens in a worker."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from halfstep.events.vocabulary import Load, MemoryFlush, Save
from halfstep.imagine.library import iterating
from halfstep.imagine.library.varying import varies
from halfstep.imagine.project import text_of
from halfstep.imagine.state import OutOfBudget, Restart, Signal
from halfstep.imagine.values import (
    Bound,
    Function,
    Instance,
    Partial,
    Stream,
    Tensor,
    Thing,
    Unknown,
    Value,
    settled,
    tags_of,
)

if TYPE_CHECKING:
    from halfstep.imagine.calls import Calls

Args = list[Value]
Kwargs = dict[str, Value]
_LOADER = (
    "dataset",
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
)


def _loader(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    given = {**dict(zip(_LOADER, args, strict=False)), **kwargs}
    dataset = settled(given.get("dataset"))
    sampler = settled(given.get("sampler"))
    shuffle = given.get("shuffle")
    inner = dataset.thing if isinstance(dataset, Instance) else dataset if isinstance(dataset, Thing) else None
    facts: dict[str, Value] = {
        "sampler": sampler,
        "batch_sampler": settled(given.get("batch_sampler")),
        "shuffle": _is_asked_for(shuffle) or (shuffle is not None and state.truth(shuffle, node)),
        "dataset": inner if inner is not None else dataset,
        "dataset name": getattr(dataset, "name", ""),
        "iterable": bool(inner is not None and inner.facts.get("iterable")),
        "map style": inner is not None and inner.facts.get("iterable") is False,
        "workers": settled(given.get("num_workers", 0)),
        "pin_memory": given.get("pin_memory", False),
        "drop_last": given.get("drop_last", False),
        "persistent": state.truth(given.get("persistent_workers", False), node),
        "worker_init": given.get("worker_init_fn") is not None,
        "open arguments": "**" in given,
        "varies": bool(state.loops) and _varies(state, node),
        "tags": tags_of(dataset) | tags_of(sampler),
    }
    facts["length"], facts["short last"] = None, False
    if not facts["iterable"]:
        facts["length"], facts["short last"] = iterating.length_of_loader(state, given, sampler, node)
    for own in (facts["batch_sampler"], sampler):
        if isinstance(own, Instance) and not EVENED.search(text_of(own.cls.node)):
            _sample(state, own, node)
    made = state.make("loader", node, **facts, **_undivided(state, dataset, given, node))
    _imagine_worker(state, made, dataset, given, node)
    return made


def _is_asked_for(value: Value) -> bool:
    """Whether a caller says it who is not known, with no default."""
    value = settled(value)
    return isinstance(value, Unknown) and not value.has_default


EVENED = re.compile(r"ceil|//|%|pad|drop|total", re.I)
"""Signs that a sampler of the program gives every rank as much."""


def _sample(state: Calls, sampler: Instance, node: ast.AST) -> None:
    """Hear how a sampler of the program begins."""
    method = sampler.cls.lookup("__iter__")
    if isinstance(method, Function):
        _quietly(state, Bound(sampler, "__iter__", method), [], node)


def _varies(state: Calls, node: ast.AST) -> bool:
    called = state.scope.names.get("\0call")  # what makes the loader may be told something else in every turn
    calls = [node, called[1]] if isinstance(called, tuple) else [node]
    key = ("varies", *map(id, calls))
    if key not in state.memo:
        state.memo[key] = any(isinstance(call, ast.expr) and varies(call, state.module.tree) for call in calls)
    return state.memo[key] is True


def has_workers(loader: Thing) -> bool:
    """Whether a loader uses worker processes (an unknown number counts as some)."""
    workers = loader.facts.get("workers")
    return not (isinstance(workers, int) and workers == 0)


def _imagine_worker(state: Calls, loader: Thing, dataset: Value, given: dict[str, Value], node: ast.AST) -> None:
    """Hear what the data set, the collate function and the worker's start do inside a worker."""
    if not has_workers(loader):
        return
    if isinstance(dataset, Instance):
        _look_at_dataset(state, dataset, given)
    jobs: list[tuple[Value, Args]] = []
    if isinstance(dataset, Instance):
        for name, arguments in (("__getitem__", [Unknown("index")]), ("__iter__", [])):
            method = dataset.cls.lookup(name)
            if isinstance(method, Function) and not method.generator:
                jobs.append((Bound(dataset, name, method), list(arguments)))
    collate, start = settled(given.get("collate_fn")), settled(given.get("worker_init_fn"))
    if isinstance(collate, (Function, Bound, Partial, Instance)):
        jobs.append((collate, [[Tensor(), Tensor()]]))
    if isinstance(start, Function):
        jobs.append((start, [Unknown("worker_id", frozenset({"worker"}))]))
    saved = state.in_worker, state.loops
    state.in_worker, state.loops = True, []
    try:
        for job, arguments in jobs:
            _quietly(state, job, arguments, node)
    finally:
        state.in_worker, state.loops = saved


SPLITS = re.compile(r"split_|islice|skip|num_shards|shard(_|\()")
BY_RANK = re.compile(SPLITS.pattern + r"|rank|world|num_replicas|distributed")
DRAWN = re.compile(
    r"torch\.rand(n|int)?\(|\brandom\.(random|uniform|gauss|randint)\(|np\.random\.(rand|randn|normal|uniform|randint)\("
)
"""Samples that are drawn by generators with another seed in every worker."""


def _undivided(state: Calls, dataset: Value, given: dict[str, Value], node: ast.AST) -> dict[str, Value]:
    """Where a stream of the program begins that gives every worker, or every rank, all samples."""
    method = dataset.cls.lookup("__iter__") if isinstance(dataset, Instance) else None
    if not isinstance(method, Function) or not dataset.cls.is_a("IterableDataset"):
        return {}
    called = (dataset.cls.module.scope.names.get(n.id) for n in ast.walk(dataset.cls.node) if isinstance(n, ast.Name))
    nodes = [*dataset.cls.node.body, *(f.node for f in called if isinstance(f, Function))]
    text = "\n".join(ast.unparse(part) for part in nodes)
    if DRAWN.search(ast.unparse(method.node)) or _is_handed_on(method):
        return {}
    place = state.place(method.node)
    by_worker = "worker" in text or given.get("worker_init_fn") is not None or (SPLITS.search(text) and "rank" not in text)
    by_rank = BY_RANK.search(text) or tags_of([*dataset.attrs.values()]) & {"rank", "strided"}
    return {"undivided by worker": None if by_worker else place, "undivided by rank": None if by_rank else place}


def _is_handed_on(method: Function) -> bool:
    """Whether `__iter__` only calls a method of another object, or walks over another data set: that may divide the samples."""
    last = method.node.body[-1] if isinstance(method.node.body, list) else None
    call = last.value if isinstance(last, ast.Return) else None
    handed = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Attribute)
    loops = [n.iter for n in ast.walk(method.node) if isinstance(n, ast.For)]
    return handed or any(isinstance(source, ast.Attribute) and _STREAM.search(source.attr) for source in loops)


_STREAM = re.compile(r"data_?set|stream|^ds$", re.I)
"""Names of what may be a data set with a way of its own to divide its samples."""


def _look_at_dataset(state: Calls, dataset: Instance, given: dict[str, Value]) -> None:
    """Generators that every worker copies."""
    getter = dataset.cls.lookup("__getitem__")
    if isinstance(getter, Function):
        read = _read_by(dataset, getter)
        for name, value in dataset.attrs.items():
            held = settled(value)
            if isinstance(held, Instance):
                held = next(
                    (v for v in map(settled, held.attrs.values()) if isinstance(v, Thing) and v.kind == "generator"), None
                )
            if isinstance(held, Thing) and held.kind == "generator" and name in read and given.get("worker_init_fn") is None:
                state.make("worker generator", read[name], made=held.place)


def _read_by(dataset: Instance, getter: Function) -> dict[str, ast.Attribute]:
    """Where `__getitem__`, or a method that it calls, reads which attribute."""
    own = [n for n in ast.walk(getter.node) if isinstance(n, ast.Attribute)]
    called = [f.node for f in (dataset.cls.lookup(n.attr) for n in own) if isinstance(f, Function)]
    beyond = [n for node in called for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    return {n.attr: n for n in reversed([*own, *beyond])}


def _quietly(state: Calls, job: Value, arguments: Args, node: ast.AST) -> None:
    try:
        got = state.call(job, arguments, {}, node)
        if isinstance(got, Stream):
            state.first_of(got)
    except (OutOfBudget, Restart):
        raise
    except Signal:
        return


def _sampler(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    name = path.rsplit(".", 1)[-1]
    given = {**dict(zip(("dataset", "num_replicas", "rank", "shuffle", "seed", "drop_last"), args, strict=False)), **kwargs}
    facts: dict[str, Value] = {
        "distributed": name == "DistributedSampler",
        "shuffle": given.get("shuffle", True) is not False,
        "drop_last": given.get("drop_last", False) is True,
        "class": name,
        "inner": settled(args[0]) if args else None,
        "samples": _told(state, name, args, kwargs, node),
    }
    return state.make("sampler", node, **facts)


def _told(state: Calls, name: str, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    """How many samples a sampler is told to hand out."""
    if name == "SubsetRandomSampler":
        return iterating.length_of_data(state, args[0] if args else kwargs.get("indices"), node)
    at = {"WeightedRandomSampler": 1, "RandomSampler": 2}.get(name, len(args))
    return settled(args[at] if at < len(args) else kwargs.get("num_samples"))


def _dataset(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Thing:
    inner = settled(args[0]) if args else None
    thing = inner.thing if isinstance(inner, Instance) else inner if isinstance(inner, Thing) else None
    iterable = bool(thing is not None and thing.facts.get("iterable"))
    made = state.make("dataset", node, iterable=iterable, tags=tags_of(args) | tags_of(kwargs))
    name = path.rsplit(".", 1)[-1]
    source = args[1] if name == "Subset" and len(args) > 1 else args[0] if name == "TensorDataset" and args else None
    made.facts["length"] = iterating.length_of_data(state, source, node)
    if name == "Subset" and len(args) > 1 and "uneven" in getattr(settled(args[1]), "tags", ()):
        state.make("strided shard", node)
        made.facts["tags"] |= {"strided"}
    return made


def _split(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    sizes = settled(args[1] if len(args) > 1 else kwargs.get("lengths"))
    parts = list(sizes) if isinstance(sizes, (list, tuple)) else [None] * 3
    total = iterating.length_of_data(state, args[0], node) if args else None
    made = [_dataset(state, node, args[:1], {}, path) for _ in parts]
    for part, size in zip(made, parts, strict=True):
        whole = int(size * total) if isinstance(size, float) and total is not None else size
        part.facts["length"] = whole if isinstance(whole, int) else None
    return made


def _save(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    saved = args[0] if args else kwargs.get("obj")
    own = "rank" in tags_of(settled(args[1] if len(args) > 1 else kwargs.get("f")))
    written = state.memo.get(("written", id(settled(saved))))
    state.emit(Save, node, states=states_in(saved), written=written, by_rank_aware=own)
    return None


_STATE = re.compile(r"scal|amp|sched|lr_s|state|extra|misc|\(\)", re.I)
"""What an unknown part of a checkpoint is called that may be the state of an object."""


def states_in(value: Value, depth: int = 0) -> frozenset[str]:
    """The kinds of object whose state a value holds; `?` when that cannot be told."""
    value = settled(value)
    if isinstance(value, Instance) and ("dataclass" in value.cls.decorators or value.cls.is_a("NamedTuple")):
        value = value.attrs
    if isinstance(value, Thing) and value.kind == "state":
        return frozenset({str(value.facts.get("of"))})
    if isinstance(value, dict) and depth < 4:
        held = [(f"{key} {getattr(settled(v), 'name', '')}", states_in(v, depth + 1)) for key, v in value.items()]
        return frozenset().union(*(found for text, found in held if found != {"?"} or _STATE.search(text)))
    if isinstance(value, (list, tuple)) and depth < 4:
        return frozenset().union(*(states_in(v, depth + 1) for v in value)) if value else frozenset()
    if isinstance(value, (Unknown, Instance)):
        return frozenset({"?"})
    if isinstance(value, Thing):
        return frozenset({value.kind})
    return frozenset()


def _load(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    located = "map_location" in kwargs or len(args) > 1 or "**" in kwargs
    state.emit(Load, node, target=None, map_location=located)
    return Unknown("checkpoint", frozenset({"loaded"}))


def _empty_cache(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    state.emit(MemoryFlush, node, kind="torch.cuda.empty_cache")
    return None


def _synchronize(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    state.memo["synchronized"] = state.number("time")
    return None


def _worker_info(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    return Unknown("worker_info", frozenset({"worker"}))


def _initial_seed(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    return Unknown("initial_seed", frozenset({"worker"}))


def _generator(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    made = state.make("context", None, what="generator")
    made.kind = "generator"
    made.facts["seed"] = args[0] if args else None
    made.place = state.place(node)
    return made


TABLE: dict[str, Callable[..., Value]] = {
    "torch.utils.data.DataLoader": _loader,
    "torchdata.stateful_dataloader.StatefulDataLoader": _loader,
    "torch.utils.data.random_split": _split,
    "torch.utils.data.get_worker_info": _worker_info,
    "torch.initial_seed": _initial_seed,
    "torch.save": _save,
    "torch.load": _load,
    "torch.cuda.empty_cache": _empty_cache,
    "torch.cuda.synchronize": _synchronize,
    "torch.accelerator.synchronize": _synchronize,
    "torch.Generator": _generator,
    "numpy.random.default_rng": _generator,
    "numpy.random.RandomState": _generator,
    "random.Random": _generator,
}
"""Handlers by path."""
PATTERNS: tuple[tuple[re.Pattern[str], Callable[..., Value]], ...] = (
    (
        re.compile(
            r"(^|\.)(DistributedSampler|RandomSampler|SequentialSampler|WeightedRandomSampler|SubsetRandomSampler|BatchSampler)$"
        ),
        _sampler,
    ),
    (re.compile(r"^torch\.utils\.data\.\w*(Dataset|Subset)$"), _dataset),
    (re.compile(r"^torchvision\.datasets\.\w+"), _dataset),
)
"""Handlers by pattern of the path."""
