"""Finds the rules: every module below `halfstep.rules` that has a `CARD` and a `check`, or `CARDS` of what is only measured."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

from halfstep.errors import UsageError
from halfstep.events.trace import Story, Trace
from halfstep.findings.card import Card
from halfstep.findings.finding import Found

Check = Callable[[Trace, Story], Iterable[Found]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A card and the function that listens to one trace of a story."""

    card: Card
    check: Check


@cache
def all_rules(package: str = "halfstep.rules") -> tuple[Rule, ...]:
    """Every rule that listens to a trace, in the order of their codes."""
    rules = [Rule(module.CARD, module.check) for module in _modules(package) if hasattr(module, "CARD")]
    return tuple(sorted(rules, key=lambda rule: rule.card.code))


@cache
def all_cards(package: str = "halfstep.rules") -> tuple[Card, ...]:
    """The card of every rule, and of every fault that only a measurement shows, in the order of their codes."""
    return tuple(sorted((card for module in _modules(package) for card in _cards(module)), key=lambda card: card.code))


def family_of(card: Card) -> str:
    """The family that a card belongs to: the folder it is in."""
    return next(module.__name__.split(".")[2] for module in _modules("halfstep.rules") if card in _cards(module))


def _cards(module: ModuleType) -> tuple[Card, ...]:
    return (*((module.CARD,) if hasattr(module, "CARD") else ()), *getattr(module, "CARDS", ()))


def _modules(package: str) -> Iterator[ModuleType]:
    root = import_module(package)
    names = (info.name for info in pkgutil.walk_packages(root.__path__, prefix=f"{package}.") if not info.ispkg)
    return (import_module(name) for name in names)


def find_rule(name: str) -> Rule:
    """The rule with this code or name.

    Raises:
        UsageError: No rule has that code or name.
    """
    card = find_card(name)
    for rule in all_rules():
        if rule.card == card:
            return rule
    raise UsageError(f"{card.name} is not heard in source: only `halfstep watch` measures it.")


def find_card(name: str) -> Card:
    """The card with this code or name.

    Raises:
        UsageError: No card has that code or name.
    """
    for card in all_cards():
        if name.lower() in (card.code.lower(), card.name):
            return card
    raise UsageError(f"there is no rule {name!r}. `halfstep explain --all` lists them.")
