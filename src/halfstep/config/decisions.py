"""Collects decisions: what the user asked for where they did, else what was decided and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from halfstep.config.choice import ASKED_FOR, Choice

Value = TypeVar("Value")


class Decisions:
    """The choices made so far, by dotted key."""

    __slots__ = ("choices",)

    def __init__(self) -> None:
        self.choices: dict[str, Choice[Any]] = {}

    def take(self, key: str, asked: object, automatic: Callable[[], Choice[Value]]) -> Value:
        """The value for `key`: `asked`, or where that is absent or "auto" the automatic one."""
        choice = automatic() if is_auto(asked) else Choice(value=asked, reason=ASKED_FOR)
        self.choices[key] = choice
        return choice.value  # type: ignore[return-value]  # the schema gave `asked` the kind of the automatic value

    def default(self, key: str, asked: object, value: Value, reason: str) -> Value:
        """Like `take`, for an automatic value that needs no thought."""
        return self.take(key, asked, lambda: Choice(value=value, reason=reason))


def is_auto(asked: object) -> bool:
    """Whether the user left the value to us."""
    return asked is None or asked == "auto"
