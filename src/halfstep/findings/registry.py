"""Finds the rules: every module below `halfstep.rules` that has a `CARD` and a `check`."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

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
    """Every rule, in the order of their codes."""
    root = import_module(package)
    names = (info.name for info in pkgutil.walk_packages(root.__path__, prefix=f"{package}.") if not info.ispkg)
    modules = (import_module(name) for name in names)
    rules = [Rule(module.CARD, module.check) for module in modules if hasattr(module, "CARD")]
    return tuple(sorted(rules, key=lambda rule: rule.card.code))


def find_rule(name: str) -> Rule:
    """The rule with this code or name.

    Raises:
        UsageError: No rule has that code or name.
    """
    for rule in all_rules():
        if name.lower() in (rule.card.code.lower(), rule.card.name):
            return rule
    raise UsageError(f"there is no rule {name!r}. `halfstep explain --all` lists them.")
