"""The values of the imagined run: concrete Python numbers and containers, and stand-ins for what is not known."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import Any

from halfstep.events.vocabulary import Divisor, Place, Ref, Region

Value = Any
Tags = frozenset[str]
NO_TAGS: Tags = frozenset()


class Count(int):
    """A whole number that remembers what it counts: `loader`, `epochs`, `accum`, `/accum`, `index`, `world` ..."""

    tags: Tags = NO_TAGS


class Ratio(float):
    """A number with a fraction that remembers what it was made from."""

    tags: Tags = NO_TAGS


def tagged(value: Value, tags: Tags) -> Value:
    """The number with these tags; other values as they are."""
    if not tags or isinstance(value, bool):
        return value
    if isinstance(value, int):
        number: Count | Ratio = Count(value)
    elif isinstance(value, float):
        number = Ratio(value)
    else:
        return value
    number.tags = tags
    return number


def counted(value: Value, guard: Tags) -> Value:
    """A number that was chosen by a condition: it depends on the data that the condition did."""
    on_data = guard & {"data", "synced"} if type(value) in (int, Count) else NO_TAGS
    return tagged(value, tags_of(value) | on_data | {"counted"}) if "data" in on_data else value


@dataclass(slots=True, eq=False)
class Truth:
    """A truth value that remembers what it depends on."""

    value: bool
    tags: Tags


@dataclass(slots=True, eq=False)
class Unknown:
    """Something the source does not say. Its attributes and calls are unknown too, always the same ones."""

    name: str
    tags: Tags = NO_TAGS
    default: Value = None
    has_default: bool = False
    normal: bool = False
    """For a condition on data: the usual answer."""
    factors: frozenset[str] = frozenset()
    thing: Thing | Tensor | Count | Ratio | None = None
    """What its use has shown it to be."""
    children: dict[str, Value] = field(default_factory=dict)
    loaders: frozenset[Thing] = frozenset()
    owner: Thing | None = None
    """The model of which it is an attribute."""


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor: where its numbers came from and what was done to them."""

    grad: bool = False
    dtype: str | None = None
    """`half`, `bfloat`, `float`, `int`, `bool` or None."""
    device: str | None = None
    scaler: Thing | None = None
    divisors: tuple[Divisor, ...] = ()
    reduction: str | None = None
    models: frozenset[Thing] = frozenset()
    eval_models: frozenset[Thing] = frozenset()
    ddp: frozenset[Thing] = frozenset()
    regions: tuple[Region, ...] = ()
    no_sync: bool | None = None
    bypassed: Place | None = None
    penalty: Place | None = None
    guard: Place | None = None
    """Where a constant too small for FP16 was added to it."""
    loaders: frozenset[Thing] = frozenset()
    tags: Tags = NO_TAGS
    copied: Place | None = None
    retained: frozenset[int] = frozenset()
    name: str = ""
    rows: int | None = None
    """Its first dimension, where the program says so."""


def derive(*parents: Tensor, **changes: Any) -> Tensor:
    """A tensor computed from others."""
    if len(parents) == 1:
        first = parents[0]
        return replace(first, **{"copied": None, "guard": None, "name": "", "rows": None, **changes})
    merged = Tensor(
        grad=any(p.grad for p in parents),
        dtype=_promoted(parents),
        device=next((p.device for p in parents if p.device), None),
        scaler=next((p.scaler for p in parents if p.scaler), None),
        divisors=_divisors(parents),
        reduction=next((p.reduction for p in parents if p.grad and p.reduction), None),
        models=frozenset().union(*(p.models for p in parents)),
        eval_models=frozenset().union(*(p.eval_models for p in parents)),
        ddp=frozenset().union(*(p.ddp for p in parents)),
        regions=tuple(dict.fromkeys(r for p in ([p for p in parents if p.grad] or parents) for r in p.regions)),
        no_sync=next((p.no_sync for p in parents if p.no_sync is not None), None),
        bypassed=next((p.bypassed for p in parents if p.bypassed), None),
        penalty=next((p.penalty for p in parents if p.penalty), None),
        loaders=frozenset().union(*(p.loaders for p in parents)),
        tags=frozenset().union(*(p.tags for p in parents)),
        retained=frozenset().union(*(p.retained for p in parents)),
    )
    return replace(merged, **changes)


def _divisors(parents: tuple[Tensor, ...]) -> tuple[Divisor, ...]:
    with_grad = [p for p in parents if p.grad]
    return max((p.divisors for p in with_grad), key=len, default=())


def _promoted(parents: tuple[Tensor, ...]) -> str | None:
    kinds = {p.dtype for p in parents} - {"int", "bool"}
    if not kinds:
        return parents[0].dtype if parents else None
    if len(kinds) == 1:
        return next(iter(kinds))
    return "float" if "float" in kinds else None


@dataclass(slots=True, eq=False)
class Thing:
    """An object of a library: a model, optimizer, scaler, scheduler, loader, sampler, context ..."""

    kind: str
    number: int
    name: str = ""
    place: Place | None = None
    given: bool = False
    escaped: bool = False
    attrs: dict[str, Value] = field(default_factory=dict)
    facts: dict[str, Value] = field(default_factory=dict)
    owners: set[Thing] = field(default_factory=set)
    """Of an optimizer or a parameter list: the models whose parameters it holds."""
    parents: list[Thing] = field(default_factory=list)
    training: bool | None = True
    dtype: str | None = None
    device: str | None = None

    @property
    def ref(self) -> Ref:
        """Its identity in events."""
        return Ref(self.kind, self.number, self.name, self.place, self.given, self.escaped)

    def family(self) -> set[Thing]:
        """Itself, what wraps it and what it is part of (wrappers are parents)."""
        seen: set[Thing] = set()
        todo = [self]
        while todo:
            thing = todo.pop()
            if thing not in seen:
                seen.add(thing)
                todo.extend(thing.parents)
        return seen


@dataclass(slots=True, eq=False)
class External:
    """A name of a library, by its full dotted path."""

    path: str

    @property
    def last(self) -> str:
        """The last part of the path."""
        return self.path.rsplit(".", 1)[-1]


@dataclass(slots=True, eq=False)
class Scope:
    """Names of a function, class or module, and the scope around."""

    names: dict[str, Value]
    outer: Scope | None = None
    module: Module | None = None
    is_class: bool = False
    owner: Class | None = None
    """The class whose body it is."""


@dataclass(slots=True, eq=False)
class Module:
    """A file of the program."""

    name: str
    path: str
    tree: ast.Module
    scope: Scope = field(default_factory=lambda: Scope({}))
    done: bool = False


@dataclass(slots=True, eq=False)
class Function:
    """A function of the program, with the scope it closes over."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    module: Module
    name: str
    defaults: list[Value] = field(default_factory=list)
    kw_defaults: list[Value] = field(default_factory=list)
    decorators: frozenset[str] = frozenset()
    owner: Class | None = None
    wrapped_by: tuple[Value, ...] = ()
    generator: bool = False
    inner: Function | None = None
    """What a decorator of the program put this function around."""

    @property
    def signature(self) -> ast.arguments:
        """The parameters, those of the innermost function if it is decorated."""
        return self.inner.signature if self.inner is not None else self.node.args


@dataclass(slots=True, eq=False)
class Class:
    """A class of the program."""

    node: ast.ClassDef
    scope: Scope
    module: Module
    name: str
    bases: list[Value]
    decorators: frozenset[str] = frozenset()

    def lookup(self, name: str) -> Value:
        """An attribute of the class or of its bases, or None."""
        if name in self.scope.names:
            return self.scope.names[name]
        for base in self.bases:
            if isinstance(base, Class) and base is not self:
                found = base.lookup(name)
                if found is not None:
                    return found
        return None

    def is_a(self, *names: str) -> bool:
        """Whether a base is a library class with one of these last names."""
        return any(
            (isinstance(base, External) and base.last in names)
            or (isinstance(base, Class) and base is not self and base.is_a(*names))
            for base in self.bases
        )


@dataclass(slots=True, eq=False)
class Instance:
    """An object of a class of the program; `thing` when it is also a library object such as a module."""

    cls: Class
    attrs: dict[str, Value] = field(default_factory=dict)
    thing: Thing | None = None
    read: set[str] = field(default_factory=set)
    """Attributes that were read."""


@dataclass(slots=True, eq=False)
class Bound:
    """A method with its object. `target` is a Function for the program's own, else None."""

    self_value: Value
    name: str
    target: Function | None = None


@dataclass(slots=True, eq=False)
class Partial:
    """`functools.partial`, and a library class with arguments already given."""

    func: Value
    args: list[Value]
    kwargs: dict[str, Value]


@dataclass(slots=True, eq=False)
class Stream:
    """A generator of the program that was called and not yet run."""

    function: Function
    scope: Scope
    cursor: Value = None
    """Its values, once some were taken one by one."""


class Items(list[Value]):
    """What a loop runs over, with the loader it comes from, and whether its elements are micro-batches."""

    loader: Thing | None = None
    beside: tuple[Thing, ...] = ()
    """Other loaders that are passed over in the same loop."""
    over: str = "items"
    tags: Tags = NO_TAGS
    endless: bool = False
    total: int | None = None
    """How many numbers a long range has, of which only some are imagined."""
    filtered: bool = False
    """Chosen by a condition on data: it may be empty."""


def part_of(values: list[Value], source: Value = None) -> Items:
    """Micro-batches that are a part of all: what a window holds."""
    made = items_like(values, source) if isinstance(source, Items) else Items(values)
    made.tags |= {"part"}
    return made


def items_like(values: list[Value], source: Items) -> Items:
    """Other values with the same origin."""
    made = Items(values)
    made.loader, made.over, made.tags, made.endless = source.loader, source.over, source.tags, source.endless
    made.beside = source.beside
    return made


def tags_of(value: Value, depth: int = 0) -> Tags:
    """What a value depends on, looking into containers."""
    if isinstance(value, (Count, Ratio, Truth, Unknown, Tensor)):
        return value.tags
    if isinstance(value, Thing):
        found = value.facts.get("tags", NO_TAGS)
        return found if isinstance(found, frozenset) else NO_TAGS
    if depth < 3 and isinstance(value, (list, tuple, set)):
        return frozenset().union(*(tags_of(item, depth + 1) for item in list(value)[:40])) if value else NO_TAGS
    if depth < 3 and isinstance(value, dict):
        return frozenset().union(*(tags_of(item, depth + 1) for item in list(value.values())[:40])) if value else NO_TAGS
    if isinstance(value, Instance):
        return tags_of(value.attrs, depth + 1)
    return NO_TAGS


def settled(value: Value) -> Value:
    """The object that an unknown value has turned out to be, else the value."""
    while isinstance(value, Unknown) and value.thing is not None:
        value = value.thing
    return value


def model_of(value: Value) -> Thing | None:
    """The model behind a value, if it is one."""
    value = settled(value)
    if isinstance(value, Instance):
        value = value.thing
    return value if isinstance(value, Thing) and value.kind == "model" else None


def flat(values: list[Value], depth: int = 0) -> list[Value]:
    """Values and what containers among them hold."""
    found: list[Value] = []
    for value in values[:60]:
        if isinstance(value, (list, tuple)) and depth < 3:
            found.extend(flat(list(value), depth + 1))
        elif isinstance(value, dict) and depth < 3:
            found.extend(flat(list(value.values()), depth + 1))
        else:
            found.append(settled(value))
    return found


def parts_of(model: Thing) -> list[Thing]:
    """The modules that a module holds or wraps, as far as they are known."""
    inner, instance, layers = (model.facts.get(fact) for fact in ("inner", "instance", "layers"))
    held = [inner] if inner is not None else layers if isinstance(layers, list) else []
    held = [*held, *instance.attrs.values()] if isinstance(instance, Instance) else held
    found = [model_of(value) for value in flat(list(held))]
    return [part for part in found if part is not None and part is not model]
