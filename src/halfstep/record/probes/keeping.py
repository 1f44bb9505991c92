"""Keeps the forwards of the update under way, so that a bad one can be made again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.precision.untouched import RandomState
from halfstep.record.probes.lines import line_of_script
from halfstep.record.probes.rerun import RERUNNING, Call, Casting, floating, versions

MOST_CALLS = 64
MOST_BYTES_ON_CPU = 256 * 2**20
MOST_BYTES_ON_ACCELERATOR = 64 * 2**20
"""How much of output gradients is held back from being freed until the update ends."""


class Keeper:
    """The forwards under gradients since the last update, newest last, with references to their inputs.

    Nothing is copied but random states: inputs and output gradients only live until the update ends.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.num_left_out = 0
        self.first_place: Any = None
        self.hooked = self.arrived = 0
        """Outputs whose gradient is waited for, and gradients that came, in the whole run."""
        self._bytes = 0
        self._open: Call | None = None
        self._hooks: list[Any] = []
        self._sample_ids: Sequence[int] | None = None
        self.device = torch.device("cpu")

    def attach(self, model: nn.Module, safely: Callable[[Callable[..., object]], Callable[..., None]]) -> None:
        """Hear the forwards of `model`; hooks are registered through `safely`."""
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._hooks = [
            model.register_forward_pre_hook(safely(self._before), with_kwargs=True),
            model.register_forward_hook(safely(self._after), with_kwargs=True),
        ]

    def detach(self) -> None:
        """Hear no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.clear()

    def clear(self) -> None:
        """The update has ended."""
        self.calls, self.num_left_out, self._bytes = [], 0, 0

    def batch_fetched(self, sample_ids: Sequence[int] | None) -> None:
        """The samples of the forwards from now on."""
        self._sample_ids = sample_ids

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._open = None
        if RERUNNING.get() or not torch.is_grad_enabled():
            return
        self._open = Call(
            args=args,
            kwargs=kwargs,
            rng=RandomState.of(self.device),
            casting=Casting.now(self.device.type),
            place=line_of_script(),
            sample_ids=self._sample_ids,
            versions=versions(args, kwargs),
        )
        self.first_place = self.first_place or self._open.place

    def _after(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call, self._open = self._open, None
        if call is None:
            return
        self.calls.append(call)
        if len(self.calls) > MOST_CALLS:
            self.calls.pop(0)
            self.num_left_out += 1
        for name, tensor in floating(output, "output").items():
            if tensor.requires_grad:
                self.hooked += 1
                tensor.register_hook(self._gradient_of(call, name))  # type: ignore[no-untyped-call]

    def _gradient_of(self, call: Call, name: str) -> Callable[[Tensor], None]:
        limit = MOST_BYTES_ON_CPU if self.device.type == "cpu" else MOST_BYTES_ON_ACCELERATOR

        def keep(gradient: Tensor) -> None:
            self.arrived += 1
            self._bytes += gradient.nbytes
            if self._bytes > limit:
                call.dropped = f"the gradient of `{name}` has {gradient.nbytes / 2**20:.0f} MiB, more than is kept of an update"
            else:
                call.output_gradients[name] = gradient

        return keep
