"""The objects of a run by identity: what they are called, what they hold, what is known of how they were made."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from halfstep.events.vocabulary import Place, Ref
from halfstep.record.syntax import syntax_of


@dataclass(slots=True)
class Known:
    """An object that was seen."""

    ref: Ref
    thing: weakref.ref[Any]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Objects:
    """Who is who. Nothing is kept alive by it."""

    _known: dict[int, Known] = field(default_factory=dict)
    _count: int = 0
    _owners: dict[int, tuple[weakref.ref[torch.Tensor], tuple[Ref, ...]]] = field(default_factory=dict)
    _held: dict[Ref, list[weakref.ref[torch.Tensor]]] = field(default_factory=dict)
    _models: dict[int, tuple[weakref.ref[torch.Tensor], Ref]] = field(default_factory=dict)

    def find(self, thing: Any) -> Known | None:
        """What is known of an object."""
        known = self._known.get(id(thing))
        return known if known is not None and known.thing() is thing else None

    def thing(self, ref: Ref) -> Any:
        """The object itself; None where it is gone."""
        return next((known.thing() for known in self._known.values() if known.ref == ref), None)

    def things(self, kind: str) -> list[Any]:
        """All objects of a kind that live, in the order in which they were met."""
        found = (known.thing() for known in self._known.values() if known.ref.kind == kind)
        return [thing for thing in found if thing is not None]

    def new(self, thing: Any, kind: str, place: Place | None, *, given: bool = False) -> Known:
        """Meet an object where it is made."""
        return self._meet(thing, kind, place, _name(place, made=True), given)

    def known(self, thing: Any, kind: str, place: Place | None) -> Known:
        """An object, met at its first use where its making was not heard."""
        return self.find(thing) or self._meet(thing, kind, place, _name(place, made=False), False)

    def _meet(self, thing: Any, kind: str, place: Place | None, name: str, given: bool) -> Known:
        self._count += 1
        known = Known(Ref(kind, self._count, name, place, given), weakref.ref(thing))
        self._known[id(thing)] = known
        return known

    def own(self, optimizer: Ref, params: Iterable[torch.Tensor]) -> None:
        """An optimizer holds these parameters."""
        for param in params:
            before = self.owners(param)
            if optimizer not in before:
                self._owners[id(param)] = (weakref.ref(param), (*before, optimizer))
                self._held.setdefault(optimizer, []).append(weakref.ref(param))

    def owners(self, param: torch.Tensor) -> tuple[Ref, ...]:
        """The optimizers that hold a parameter."""
        held = self._owners.get(id(param))
        return held[1] if held is not None and held[0]() is param else ()

    def held(self, optimizer: Ref) -> Iterator[torch.Tensor]:
        """The parameters that an optimizer holds."""
        return (param for held in self._held.get(optimizer, ()) if (param := held()) is not None)

    def hold(self, model: Ref, module: nn.Module, *, wrapper: bool = False) -> None:
        """The parameters of a model that was called; the first model that has one keeps it, unless a wrapper comes."""
        for param in module.parameters():
            held = self._models.get(id(param))
            if wrapper or held is None or held[0]() is not param:
                self._models[id(param)] = (weakref.ref(param), model)

    def model_of(self, param: torch.Tensor) -> Ref | None:
        """The model whose parameter it is."""
        held = self._models.get(id(param))
        return held[1] if held is not None and held[0]() is param else None


def _name(place: Place | None, *, made: bool) -> str:
    syntax = syntax_of(place.path) if place is not None else None
    if syntax is None or place is None:
        return ""
    return (made and syntax.name_at(place)) or syntax.receiver_at(place)
