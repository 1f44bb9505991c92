"""Where the first value that is not finite is made: a micro-batch is run once more, under hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.engine.batch import tensors, to_device
from halfstep.engine.loss import LossFunction, sum_and_weight
from halfstep.precision.policy import Policy
from halfstep.precision.untouched import untouched


def first_non_finite_module(
    module: nn.Module, loss: LossFunction, batch: Any, policy: Policy, *, scale: float, device: torch.device
) -> str | None:
    """Which module first makes a value that is not finite, in forward or in backward; None where none does.

    Parameters, their `.grad`, buffers and random states are left as they were.

    Args:
        scale: what the summed loss is multiplied by before backward.
    """
    search = _Search()
    with untouched(module, device), ExitStack() as hooks:
        for name, child in module.named_modules():
            if not any(True for _ in child.children()):
                watch = search.watcher(f"`{name or 'the model'}` ({type(child).__name__})")
                hooks.callback(child.register_forward_hook(watch, with_kwargs=True).remove)
        with policy.autocast():
            total, _ = sum_and_weight(loss(module, to_device(batch, device)))
        if search.found is None and not math.isfinite(total.item()):
            return "in the loss"
        return search.found or _in_backward(module, total * scale, search)


def _in_backward(module: nn.Module, total: Tensor, search: _Search) -> str | None:
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    gradients = torch.autograd.grad(total, [p for _, p in trained], allow_unused=True)
    if search.found is not None:
        return search.found
    broken = [name for (name, _), g in zip(trained, gradients, strict=True) if g is not None and not _is_finite(g)]
    return f"in the gradient of `{broken[-1]}`" if broken else None


class _Search:
    """Looks at what goes into modules and comes out of them, forward and then backward, until it finds something."""

    def __init__(self) -> None:
        self.found: str | None = None
        self._tensors: list[Tensor] = []
        self._makers: dict[int, str] = {}
        self._users: dict[int, list[str]] = {}
        self._passed: set[str] = set()

    def watcher(self, name: str) -> Callable[..., None]:
        """A forward hook for one module."""

        def watch(_child: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            for tensor in _floating((args, kwargs)):
                if tensor.requires_grad:
                    self._look(tensor, f"in the input of {name}")
                    self._hooked(tensor).append(name)
            for tensor in _floating(output):
                self._look(tensor, f"in the forward of {name}")
                if tensor.requires_grad:
                    self._hooked(tensor)
                    self._makers.setdefault(id(tensor), name)

        return watch

    def _look(self, tensor: Tensor, where: str) -> None:
        if self.found is None and not _is_finite(tensor):
            self.found = where

    def _hooked(self, tensor: Tensor) -> list[str]:
        """The modules that take `tensor`; backward comes by it from now on."""
        key = id(tensor)
        if key not in self._users:
            self._users[key] = []
            self._tensors.append(tensor)  # kept, so that no other tensor gets its id
            tensor.register_hook(lambda gradient: self._look_back(key, gradient))  # type: ignore[no-untyped-call]
        return self._users[key]

    def _look_back(self, key: int, gradient: Tensor) -> None:
        """Blame a module that got a finite gradient and gave back one that is not; else say whose output's gradient it is."""
        maker = self._makers.get(key)
        if _is_finite(gradient):
            self._passed.update([maker] if maker else [])
        elif self.found is None:
            guilty = [user for user in self._users[key] if user in self._passed]
            where = (
                f"in the gradient of the output of {maker}" if maker else f"in the gradient of the input of {self._users[key][0]}"
            )
            self.found = f"in the backward of {guilty[0]}" if guilty else where


def _floating(nested: Any) -> Iterator[Tensor]:
    return (tensor for _, tensor in tensors(nested) if tensor.is_floating_point())


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
