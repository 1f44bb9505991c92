"""Puts wrappers in the place of functions and methods, and takes every one of them out again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any

_ABSENT = object()


@dataclass(slots=True)
class Patches:
    """What was replaced, in order; `undo` restores it in the other order."""

    _done: list[tuple[Any, str, object, object]] = field(default_factory=list)
    _handles: list[Any] = field(default_factory=list)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by what `make` returns for it; where there is no such name, do nothing."""
        before = vars(owner).get(name, _ABSENT)
        original = getattr(owner, name, None)
        if original is None:
            return
        after = update_wrapper(make(original), original)
        setattr(owner, name, after)
        self._done.append((owner, name, before, after))

    def keep(self, handle: Any) -> None:
        """A handle of one of torch's own hooks, to be removed at the end."""
        self._handles.append(handle)

    def undo(self) -> None:
        """Restore everything, except what somebody else has replaced since."""
        for owner, name, before, after in reversed(self._done):
            if vars(owner).get(name, _ABSENT) is not after:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        for handle in self._handles:
            handle.remove()
        self._done.clear()
        self._handles.clear()
