"""`[tool.halfstep]` in `pyproject.toml`: which rules, how severe, which files."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from halfstep.errors import ConfigError
from halfstep.findings.card import Card
from halfstep.findings.finding import Severity
from halfstep.findings.registry import Rule, all_cards, all_rules

KEYS = ("select", "ignore", "severity", "exclude")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to ask. An empty `select` means every rule; names, codes and starts of codes are understood."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    severity: dict[str, Severity] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()

    def rules(self) -> tuple[Rule, ...]:
        """The rules to ask.

        Raises:
            ConfigError: A name is no rule's.
        """
        asked = self.cards()
        return tuple(rule for rule in all_rules() if rule.card in asked)

    def cards(self) -> tuple[Card, ...]:
        """The cards of what is asked for, that of measured faults included.

        Raises:
            ConfigError: A name is no card's.
        """
        for name in (*self.select, *self.ignore, *self.severity):
            if not any(_means(name, card) for card in all_cards()):
                raise ConfigError(f"`{name}` is no rule's name or code. `halfstep explain --all` lists them.")
        chosen = [card for card in all_cards() if not self.select or any(_means(name, card) for name in self.select)]
        return tuple(card for card in chosen if not any(_means(name, card) for name in self.ignore))

    def severities(self) -> dict[str, Severity]:
        """The severity of each rule that the settings speak of, by its name; the longest start of its code counts."""
        found: dict[str, Severity] = {}
        for name in sorted(self.severity, key=lambda name: (name.islower(), len(name))):
            found |= {card.name: self.severity[name] for card in all_cards() if _means(name, card)}
        return found


def _means(name: str, card: Card) -> bool:
    return name == card.name or ((name.isupper() or name[:2].isupper()) and card.code.startswith(name)) or name == "ALL"


def nearest(start: Path) -> Settings:
    """The settings of the closest `pyproject.toml` with a `[tool.halfstep]` table, else the defaults."""
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            text = file.read_text(encoding="utf-8", errors="replace")
            if "tool.halfstep" in text:
                return parsed(text, file)
            return Settings()
    return Settings()


def parsed(text: str, file: Path) -> Settings:
    """The settings in the text of a `pyproject.toml`.

    Raises:
        ConfigError: The table holds something that is not understood.
    """
    try:
        tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise ConfigError(f"{file} cannot be read: before Python 3.11 that needs the package `tomli`.") from None
    try:
        tools = tomllib.loads(text).get("tool", {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: {error}.") from error
    table = tools.get("halfstep", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: `halfstep` is {table!r}; it should be a table, `[tool.halfstep]`.")
    table = table.get("check", table)
    unknown = [key for key in table if key not in KEYS and not isinstance(table[key], dict)]
    if unknown:
        raise ConfigError(f"{file}: [tool.halfstep] has no key `{unknown[0]}`. It knows {', '.join(KEYS)}.")
    severities = table.get("severity", {})
    if not isinstance(severities, dict):
        raise ConfigError(f"{file}: `severity` is {severities!r}; it should be a table of rules, `[tool.halfstep.severity]`.")
    return Settings(
        select=_names(table, "select", file),
        ignore=_names(table, "ignore", file),
        exclude=_names(table, "exclude", file),
        severity={name: severity_of(str(value)) for name, value in severities.items()},
    )


def _names(table: dict[str, object], key: str, file: Path) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ConfigError(f"{file}: `{key}` is {value!r}; it should be a list of strings.")
    return tuple(str(v) for v in value)


def severity_of(name: str) -> Severity:
    """The severity of this name.

    Raises:
        ConfigError: There is none.
    """
    try:
        return Severity(name)
    except ValueError:
        words = ", ".join(s.value for s in Severity)
        raise ConfigError(f"`{name}` is no severity. They are {words}.") from None
