"""What loops run over: ranges, pairs, wrappers such as progress bars, and how long data sets and loaders are."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from halfstep.imagine.cursors import Cursor, collected, cursor_over, say_left
from halfstep.imagine.state import ACCUMULATION, WHOLE_WINDOWS, OutOfBudget, Restart, Signal, Stopped
from halfstep.imagine.values import (
    NO_TAGS,
    Bound,
    Function,
    Instance,
    Items,
    Stream,
    Tensor,
    Thing,
    Unknown,
    Value,
    items_like,
    part_of,
    settled,
    tagged,
    tags_of,
)

if TYPE_CHECKING:
    from halfstep.imagine.calls import Calls

Args = list[Value]
Kwargs = dict[str, Value]


def _len(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    value = settled(args[0]) if args else None
    if isinstance(value, Items) and value.loader:
        return tagged(len(value), frozenset({"loader"}))
    if isinstance(value, (list, tuple)):
        batches = len(value) > 1 and _is_batch(value[0])
        first = settled(value[0]) if value else None
        losses, means = isinstance(first, Tensor) and first.grad, "sum of means" in tags_of(first)
        return tagged(len(value), frozenset({"loader"}) if batches or means else frozenset({"parts"}) if losses else NO_TAGS)
    if isinstance(value, (dict, str)):
        return len(value)
    if isinstance(value, Thing) and value.kind == "loader":
        return tagged(state.batches_of(value), frozenset({"loader"}))
    if isinstance(value, Thing) and value.kind == "dataset":
        return _samples(state, value, value, node)
    if isinstance(value, Tensor):
        return _rows(value)
    if isinstance(value, Instance):
        if value.thing is not None and value.thing.kind == "dataset":
            return _samples(state, value, value.thing, node)
        method = value.cls.lookup("__len__")
        return state.call(Bound(value, "__len__", method), [], {}, node) if isinstance(method, Function) else Unknown("len")
    if isinstance(value, Unknown):
        return _unknown_length(state, value)
    return Unknown("len")


def _samples(state: Calls, value: Value, thing: Thing, node: ast.AST) -> Value:
    known = length_of_data(state, value, node)
    tags = frozenset({"dataset"})
    return Unknown(f"len({thing.name})", tags) if known is None else tagged(int(known), tags)


def _rows(value: Tensor) -> Value:
    tags = frozenset({"batch size"})
    return Unknown("batch size", tags) if value.rows is None or value.loaders else tagged(value.rows, tags)


def _unknown_length(state: Calls, value: Unknown) -> Value:
    last = value.name.rsplit(".", 1)[-1].lower()
    if "dataset" in value.tags or last.endswith(("dataset", "_ds", "_set")) or last == "ds":
        return Unknown(f"len({value.name})", frozenset({"dataset"}))
    if "batch size" in value.tags or value.loaders:
        return Unknown("batch size", frozenset({"batch size"}))
    if any(word in last for word in ("load", "batches", "iter", "_dl", "data")) or last == "dl":
        return tagged(state.micro_batches, frozenset({"loader"}))
    return Unknown(f"len({value.name})", value.tags & {"strided"})


def _is_batch(value: Value) -> bool:
    value = settled(value)
    if isinstance(value, Tensor):
        return not value.grad
    if isinstance(value, (tuple, list)):
        return bool(value) and any(_is_batch(v) for v in value[:3])
    return isinstance(value, dict) and any(_is_batch(v) for v in list(value.values())[:3])


def _range(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    values = [state.unwrap_truth(settled(a)) for a in args]
    tags = frozenset().union(*(tags_of(v) for v in values)) if values else NO_TAGS
    bounds = [v if isinstance(v, int) else _bound(v, state) for v in values]
    if len(values) > 1 and not isinstance(values[0], int):
        bounds[0] = 0
    if len(values) > 2 and not isinstance(values[1], int):
        bounds[1] = bounds[0] + bounds[2] * (ACCUMULATION if "batch size" in tags_of(values[1]) else state.micro_batches)
    try:
        numbers = range(*[int(b) for b in bounds][:3])
    except (ValueError, TypeError):
        numbers = range(state.micro_batches)
    made = Items([tagged(i, frozenset({"index"}) | (tags & {"rank"})) for i in _sample(numbers)])
    made.total = len(numbers)
    made.over, made.tags = "count", tags | ({"part"} if len(values) > 2 and tags & {"batch size", "loader"} else NO_TAGS)
    if len(values) > 2 and "rank" in tags_of(values[0]) and not _is_even(values[1], values[2]):
        made.tags |= {"uneven"}
    if "loader" in tags and "epochs" not in tags:
        made.over = "loader"
        made.loader = state.memo.setdefault(("range", id(node)), state.make("loader", None, name="range", given=True))
    return made


def _is_even(stop: Value, step: Value) -> bool:
    """Whether a stride over the ranks gives each as many."""
    if isinstance(stop, int) and isinstance(step, int):
        return step != 0 and stop % step == 0
    return "world" in tags_of(stop)


def _bound(value: Value, state: Calls) -> int:
    name = getattr(value, "name", "")
    return state.micro_batches * 2 if "step" in name or "iter" in name else state.micro_batches


def _sample(numbers: range) -> list[int]:
    if len(numbers) <= 2 * WHOLE_WINDOWS:
        return list(numbers)
    return [*numbers[:WHOLE_WINDOWS], *numbers[-(WHOLE_WINDOWS + len(numbers) % WHOLE_WINDOWS) :]]


def _enumerate(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    source = state.items(settled(args[0]), node) if args else Items()
    start = state.unwrap_truth(settled(args[1] if len(args) > 1 else kwargs.get("start", 0)))
    start = start if isinstance(start, int) else 0
    index = frozenset({"index"})
    return items_like([(tagged(start + i, index), item) for i, item in enumerate(source)], source)


def _zip(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    cursors = [_cursor(state, a) for a in args]
    if len(args) > 1 and cursors[0] is not None and all(c is cursors[0] for c in cursors):
        source = cursors[0].rest()
        if len(source) % len(args) and not source.endless:
            say_left(state, len(source) % len(args), node, counted=False)
        return _grouped(source, len(args), whole=True)
    counts = [len(state.items(settled(a), node)) for a, c in zip(args, cursors, strict=True) if c is None]
    sources = [
        items_like(c.take(min(counts)), c) if c is not None and counts and not c.endless else state.items(settled(a), node)
        for a, c in zip(args, cursors, strict=True)
    ]
    if not sources:
        return Items()
    first = next((s for s in sources if s.loader is not None), sources[0])
    finite = [s for s in sources if not s.endless] or sources
    length = min(len(s) for s in finite)
    made = items_like([tuple(s[min(i, len(s) - 1)] for s in sources if s) for i in range(length)], first)
    made.beside = tuple(dict.fromkeys(s.loader for s in sources if s.loader is not None and s.loader is not first.loader))
    return made


def _iter(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    value = settled(args[0]) if args else None
    looped = isinstance(value, (list, tuple, Unknown)) or (isinstance(value, Thing) and value.kind in ("loader", "dataset"))
    return cursor_over(state, state.items(value, node)) if looped and len(args) == 1 and not isinstance(value, Cursor) else value


def _next(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    value = settled(args[0]) if args else None
    if isinstance(value, Stream):
        value = collected(state, value)
    if isinstance(value, Cursor):
        got = value.take(1)
        if not got and len(args) > 1:
            return args[1]
        if not got and state.catching:
            raise Stopped
        return (got or value.take(1) or [Unknown("next")])[0]
    if isinstance(value, (list, tuple)):
        return value[0] if value else Unknown("next")
    items = state.items(value, node)
    return items[0] if items else Unknown("next")


def _cursor(state: Calls, value: Value) -> Cursor | None:
    """The iterator that a value is."""
    value = settled(value)
    return collected(state, value) if isinstance(value, Stream) else value if isinstance(value, Cursor) else None


def _same(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    """A progress bar around something: as a loop sees it, the thing itself."""
    return args[0] if args else kwargs.get("iterable", kwargs.get("sequence", Unknown("bar")))


def _islice(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    stop = settled(args[1 if len(args) == 2 else 2]) if len(args) > 1 else None
    cursor = _cursor(state, args[0]) if args else None
    if cursor is not None and isinstance(stop, int):
        return part_of(cursor.take(stop), items_like([], cursor))
    source = state.items(settled(args[0]), node) if args else Items()
    if not isinstance(stop, int):
        return part_of(list(source), source)
    return part_of(list(source)[:stop], source)


def _batched(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    source = state.items(settled(args[0]), node) if args else Items()
    count = state.unwrap_truth(settled(args[1])) if len(args) > 1 else None
    return _grouped(source, count if isinstance(count, int) and count > 0 else 4, whole=False)


def _grouped(source: Items, size: int, whole: bool) -> Items:
    """Groups of so many items; a shorter last one is left out where only whole ones are asked for."""
    groups = [part_of(list(source)[at : at + size], source) for at in range(0, len(source), size)]
    return Items(groups[: len(source) // size] if whole else groups)


def _cycle(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    source = state.items(settled(args[0]), node) if args else Items()
    made = items_like((list(source) * 2 * state.micro_batches)[: 2 * state.micro_batches], source)
    made.loader, made.endless = None, True
    return made


def _count(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    start = state.unwrap_truth(settled(args[0])) if args else 0
    first = start if isinstance(start, int) else 0
    made = Items([tagged(first + i, frozenset({"index"})) for i in range(2 * state.micro_batches)])
    made.over, made.endless = "count", True
    return made


# --- lengths ---


def length_of_data(state: Calls, value: Value, node: ast.AST) -> int | None:
    """How many samples a data set holds, where the program says so."""
    value = settled(value)
    if isinstance(value, Instance):
        method = value.cls.lookup("__len__")
        length = _asked(state, value, method, node) if isinstance(method, Function) else None
    elif isinstance(value, Thing):
        length = value.facts.get("length")
    elif isinstance(value, Tensor):
        length = value.rows
    else:
        length = (getattr(value, "total", None) or len(value)) if isinstance(value, (list, tuple)) else None
    return length if isinstance(length, int) and "guessed" not in tags_of(length) else None


def _asked(state: Calls, value: Instance, method: Function, node: ast.AST) -> Value:
    try:
        return settled(state.call(Bound(value, "__len__", method), [], {}, node))
    except (OutOfBudget, Restart):
        raise
    except Signal:
        return None


def length_of_loader(state: Calls, given: dict[str, Value], sampler: Value, node: ast.AST) -> tuple[int | None, bool]:
    """How many micro-batches a loader yields, where data set, batch size and sampler say so, and whether the last is shorter."""
    size = settled(given.get("batch_size", 1))
    samples = _handed_out(state, given, sampler, node) if given.get("batch_sampler") is None else None
    if samples is None or not isinstance(size, int) or size < 1 or "guessed" in tags_of(size) or "**" in given:
        return None, False
    if isinstance(sampler, Thing) and sampler.facts.get("distributed"):
        samples = -(-samples // 2)
    if state.truth(given.get("drop_last", False), node):
        return samples // size, False
    return -(-samples // size), samples > size and samples % size > 0


def _handed_out(state: Calls, given: dict[str, Value], sampler: Value, node: ast.AST) -> int | None:
    """How many samples a loader hands out: those of its data set, or as many as its sampler is told."""
    if isinstance(sampler, Thing) and sampler.facts.get("samples") is not None:
        told = sampler.facts["samples"]
        return told if isinstance(told, int) and "guessed" not in tags_of(told) else None
    whole = sampler is None or (isinstance(sampler, Thing) and sampler.facts.get("class") in WHOLE_SAMPLERS)
    return length_of_data(state, given.get("dataset"), node) if whole else None


WHOLE_SAMPLERS = ("DistributedSampler", "RandomSampler", "SequentialSampler")
"""Samplers that hand out every sample once."""


TABLE: dict[str, Callable[..., Value]] = {
    "builtins.len": _len,
    "builtins.range": _range,
    "builtins.enumerate": _enumerate,
    "builtins.zip": _zip,
    "builtins.iter": _iter,
    "builtins.next": _next,
    "itertools.islice": _islice,
    "itertools.count": _count,
    "itertools.cycle": _cycle,
}
"""Handlers by path."""
PATTERNS: tuple[tuple[re.Pattern[str], Callable[..., Value]], ...] = (
    (re.compile(r"(^|\.)(trange|tnrange)$"), _range),
    (re.compile(r"^(itertools|more_itertools)\.(batched|chunked|ichunked)$"), _batched),
    (re.compile(r"(^|\.)(tqdm|tqdm_notebook|track|alive_it|progressbar|skip_first_batches)$"), _same),
)
"""Handlers by pattern of the path."""
