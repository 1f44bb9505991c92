"""From drafts to events: which optimizers a loss reaches is known only when all of them were seen."""

from __future__ import annotations

import re
from collections.abc import Callable

from halfstep.events.trace import Trace
from halfstep.events.vocabulary import Backward, Clip, Event, Fetch, Forward, Made, ModuleReplaced, Place, Ref, Step, ZeroGrad
from halfstep.imagine.library.formats import WITH_PARAMETERS
from halfstep.imagine.project import text_of
from halfstep.imagine.state import Draft, OutOfBudget, Reach, State
from halfstep.imagine.values import Instance, Tensor, Thing, Value, model_of

MAX_OPTIMIZERS = 24
"""A program with more is no training script."""


def trace_of(state: State, root: str, repeated: bool) -> Trace:
    """The finished trace of a run."""
    if sum(t.kind == "optimizer" for t in state.things) > MAX_OPTIMIZERS:
        raise OutOfBudget
    _note_unused(state)
    resolver = _Resolver(state)
    events = tuple(resolver.event(serial, draft) for serial, draft in enumerate(state.drafts))
    return Trace(events, state.world.decisions, root, repeated)


_WALKS = re.compile(
    r"self\.(children|modules|named_children|named_modules|_modules|parameters)\b|getattr\(self|__dict__|vars\(self"
)


def _note_unused(state: State) -> None:
    """The modules of DDP models that no code read."""
    for thing in state.things:
        inner = thing.facts.get("inner")
        if thing.facts.get("wrapper") == "ddp" and isinstance(inner, Thing):
            thing.facts["unused modules"] = tuple(_unused_in(inner))


def _unused_in(model: Thing) -> list[str]:
    instance = model.facts.get("instance")
    if not isinstance(instance, Instance) or not model.facts.get("followed") or _WALKS.search(text_of(instance.cls.node)):
        return []
    found: list[str] = []
    for name, value in instance.attrs.items():
        child = model_of(value)
        if child is None or child.facts.get("frozen") or child.given:
            continue
        found += [f"self.{name}"] if name not in instance.read else _unused_in(child)
    return found


class _Resolver:
    def __init__(self, state: State) -> None:
        self.optimizers = [t for t in state.things if t.kind == "optimizer"]
        self.drafts, self.things = state.drafts, state.things
        self.made = {d.fields["what"]: i for i, d in enumerate(state.drafts) if d.kind is Made}
        self.trained = {t.loop for d in self.drafts if d.kind in (Backward, Fetch, Forward) for t in d.fields["loops"]}
        self.vague = [t for t in self.optimizers if not t.owners and not t.facts.get("of copies")]
        self.stepping = {d.fields["optimizer"].ref for d in state.drafts if d.kind is Step}
        several = len(self.optimizers) > 1
        self.ahead = [(i, d) for i, d in enumerate(state.drafts) if d.kind in (Backward, Step)] if several else []

    def event(self, serial: int, draft: Draft) -> Event:
        fields: dict[str, Value] = {}
        for name, value in draft.fields.items():
            if isinstance(value, Reach):
                fields[name] = self.reached(value, serial, draft)
            elif name == "partial" and draft.kind is Clip:
                continue
            else:
                fields[name] = _plain(value)
        fields["loops"] = tuple(t for t in draft.fields["loops"] if t.over != "items" or t.loop in self.trained)
        if draft.kind is ZeroGrad:
            fields["optimizers"] = self.cleared(fields["optimizers"])
        if draft.kind is ModuleReplaced:
            added = draft.fields["module"]
            released, missing = added is draft.fields["model"], draft.fields["optimizers"] if not self.kept(added) else ()
            missing = (t for t in missing if t.facts.get("left out")) if released else missing
            fields["optimizers"] = tuple(t.ref for t in missing if added not in t.owners or released)
        if draft.kind is Clip:
            fields["partial"] = self.partly(draft, serial)
        if draft.kind is Backward:
            fields["untrained"] = tuple(m.ref for m in draft.fields["optimizers"].models if self.untrained(m))
            apart = [self.apart(m) for m in sorted(draft.fields["optimizers"].models, key=lambda m: m.number)]
            fields["apart"] = tuple(dict.fromkeys(place for place in apart if place is not None))
        return draft.kind(serial=serial, **fields)

    def reached(self, reach: Reach, serial: int, draft: Draft) -> tuple[Ref, ...]:
        named = [t.ref for t in self.optimizers if t in reach.models]
        if named:
            return tuple(named)
        found = [t for t in self.optimizers if t.owners and self.made.get(t, -1) < serial and _touches(t, reach.models)]
        if reach.models and found and not any(m for m in reach.models if not _owned(m, found)):
            return tuple(t.ref for t in found)
        vague = self.vague
        if not reach.models:
            found = [t for t in self.optimizers if self.made.get(t, -1) < serial]
            if draft.kind in (Backward, Clip):
                found = self.stepping_next(serial, found) or found
            return tuple(t.ref for t in found)
        if len(vague) > 1 and draft.kind in (Backward, Clip):
            vague = self.stepping_next(serial, vague)
        return tuple(t.ref for t in [*found, *vague])

    def kept(self, module: Thing) -> bool:
        """Whether a module is meant to stay as it is: it is frozen, or only ever called without gradients."""
        calls = [d.fields["grad_enabled"] for d in self.drafts if d.kind is Forward and d.fields["model"] is module]
        return module.facts.get("frozen") is True or module.facts.get("held back") is True or (bool(calls) and not any(calls))

    def cleared(self, named: tuple[Ref, ...]) -> tuple[Ref, ...]:
        """What never steps and was taken for an optimizer may as well be the model of any whose parameters are not known."""
        vague = [t.ref for t in self.vague]
        held = [t.owners for t in self.optimizers if t.ref in named and t.owners and t.facts.get("whole")]
        same = [t.ref for t in self.optimizers if t.owners in held and t.facts.get("whole")]
        named = tuple(dict.fromkeys([*named, *same]))
        if not named or {*named} & self.stepping or not {*named} <= {*vague}:
            return named
        return tuple(dict.fromkeys([*named, *vague]))

    def untrained(self, model: Thing) -> bool:
        """Whether this layer is surely meant to be trained and is in no optimizer of the run."""
        family = model.family()
        if not self._moved_by_none(model) or any(_KEPT.search(t.name) for t in family):
            return False
        roots = {t for t in family if not t.parents}
        beside = any(roots & owner.family() for t in self.optimizers for owner in t.owners)
        meant = beside or any(_HEAD.search(t.name) or _is_loss(t) for t in family)
        return meant and all(self._placed_outside(t) for t in roots)

    def _moved_by_none(self, model: Thing) -> bool:
        """Whether a layer that is not kept as it is has parameters that are in no optimizer."""
        if not self.optimizers or not all(t.owners and t.facts.get("whole") for t in self.optimizers):
            return False
        family = model.family()
        kept = any(t.facts.get(fact) for t in family for fact in ("frozen", "partly frozen", "loaded", "copy_of"))
        if kept or not _has_own_parameters(model) or any(t.given or t.training is False or t.escaped for t in family):
            return False
        return not _owned(model, self.optimizers)

    def apart(self, model: Thing) -> Place | None:
        """Where a module keeps this layer in a plain container, so that no optimizer has it, unless that is meant."""
        held = next((t.facts["kept apart"] for t in model.family() if "kept apart" in t.facts), None)
        return held[1] if held is not None and self._moved_by_none(model) and not _HIDDEN.search(held[0]) else None

    def _placed_outside(self, model: Thing) -> bool:
        """Whether a model was made outside of other modules, so that it is no part that was not seen to be one."""
        instances = [t.facts.get("instance") for t in self.things if t.kind == "model"]
        spans = {(i.cls.node.lineno, i.cls.node.end_lineno or 0) for i in instances if isinstance(i, Instance)}
        place = model.place
        return place is not None and not any(first <= place.line <= last for first, last in spans)

    def stepping_next(self, serial: int, among: list[Thing]) -> list[Thing]:
        """Of optimizers that cannot be told apart those that step next, before another loss is backpropagated."""
        found: list[Thing] = []
        for index, draft in self.ahead:
            if draft.kind is Backward and index > serial and found:
                break
            if draft.kind is Step and index > serial and draft.fields["optimizer"] in among:
                found.append(draft.fields["optimizer"])
        return list(dict.fromkeys(found))

    def covered(self, owner: Thing, models: frozenset[Thing]) -> bool:
        """Whether these models hold all that an owner holds: itself, what wraps it or it wraps, or all of its parts."""
        if models & owner.family() or models & _wrapped(owner):
            return True
        parts = [t for t in self.things if t.kind == "model" and _wrapped(owner) & set(t.parents)]
        return bool(parts) and all(models & t.family() for t in parts)

    def partly(self, draft: Draft, serial: int) -> tuple[Ref, ...]:
        reach = draft.fields["optimizers"]
        if not isinstance(reach, Reach) or not reach.models:
            return ()
        heard = self.backpropagated(serial)
        return tuple(
            t.ref
            for t in self.optimizers
            if _touches(t, reach.models)
            and not all(
                self.covered(o, reach.models) for o in t.owners if heard(o) and t.facts.get("joined", {}).get(o, 0) < serial
            )
        )

    def backpropagated(self, serial: int) -> Callable[[Thing], bool]:
        """Whether a model may have gradients of the last loss: what was replaced, or is not yet used, has none."""
        last = next((d for d in reversed(self.drafts[:serial]) if d.kind is Backward), None)
        reach = last.fields["optimizers"] if last is not None else None
        if not isinstance(reach, Reach) or not reach.models:
            return lambda owner: True
        return lambda owner: any(_related(owner, model) for model in reach.models)


_KEPT = re.compile(
    r"disc|critic|teacher|target|ref|reward|vgg|lpips|percep|pretrain|fro[sz]en|fixed|momentum|ema|judge|backbone|encoder|feature"
    r"|base|body|trunk|stem|^d$",
    re.I,
)
"""Names of models that people leave untrained on purpose, often without saying so."""
_HIDDEN = re.compile(r"teach|target|ref|vgg|lpips|percep|pretrain|fro[sz]en|fixed|momentum|ema|judge|reward|hid|^_", re.I)
"""Names of containers in which people keep modules on purpose so that they are not trained."""
_HEAD = re.compile(r"head|^out|proj|predict|classif|loss|crit|^fc|decoder|metric|margin|adapter|embed", re.I)
"""Names of modules beside the main model that are nearly always meant to be trained with it."""


def _is_loss(model: Thing) -> bool:
    """Whether a module is of a class of the program that is named as a loss."""
    instance = model.facts.get("instance")
    return isinstance(instance, Instance) and instance.cls.name.endswith("Loss")


def _has_own_parameters(model: Thing) -> bool:
    """Whether a model is a layer with parameters, or holds some itself."""
    instance = model.facts.get("instance")
    if isinstance(instance, Instance):
        return any(isinstance(v, Tensor) and v.grad and v.name == "parameter" for v in instance.attrs.values())
    return isinstance(name := model.facts.get("class"), str) and WITH_PARAMETERS.search(name) is not None


def _wrapped(model: Thing) -> set[Thing]:
    """A model and what it wraps."""
    inner = model.facts.get("inner")
    return {model} | (_wrapped(inner) if isinstance(inner, Thing) else set())


def _touches(optimizer: Thing, models: frozenset[Thing]) -> bool:
    return any(_related(owner, model) for owner in optimizer.owners for model in models)


def _related(a: Thing, b: Thing) -> bool:
    return a in b.family() or b in a.family()


def _owned(model: Thing, optimizers: list[Thing]) -> bool:
    return any(_related(owner, model) for t in optimizers for owner in t.owners)


def _plain(value: Value) -> Value:
    if isinstance(value, Thing):
        return value.ref
    if isinstance(value, tuple):
        return tuple(_plain(v) for v in value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
