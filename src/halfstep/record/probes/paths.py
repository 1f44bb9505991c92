"""Which module the operation that runs now belongs to, in forward and in backward."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

NO_NUMBER = 2**63
"""Nodes that add gradients up have numbers above this: they were made in no forward."""


class Paths:
    """Follows modules by their hooks between `install` and `remove`.

    In backward, an operation runs for an autograd node, and nodes are numbered as forward makes them: so the module that was
    running when a number came up owns the node.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._hooks: list[Any] = []
        self._running: list[str] = []
        self._starts: list[int] = []
        self._owners: list[str] = []

    def install(self) -> None:
        """Follow from now on."""
        model = self._model()
        for path, module in model.named_modules() if model is not None else ():
            self._hooks.append(module.register_forward_pre_hook(self._entering(path), prepend=True))
            self._hooks.append(module.register_forward_hook(self._leaving(path), always_call=True))
        self._mark("")

    def remove(self) -> None:
        """Follow no more; nodes made until now keep their owners."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._running = [], []

    def now(self) -> str:
        """The path of the module; empty for the model itself and for what is outside of it."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return self._running[-1] if self._running else ""
        number = node._sequence_nr()
        return self._owners[max(bisect_right(self._starts, number) - 1, 0)] if number < NO_NUMBER and self._owners else ""

    def _entering(self, path: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._running.append(path)
            self._mark(path)

        return enter

    def _leaving(self, path: str) -> Callable[..., None]:
        def leave(*_: Any) -> None:
            while self._running and self._running.pop() != path:
                pass
            self._mark(self._running[-1] if self._running else "")

        return leave

    def _mark(self, path: str) -> None:
        """From the next autograd node on, nodes belong to `path`."""
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._owners.append(path)
