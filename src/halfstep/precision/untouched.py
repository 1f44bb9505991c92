"""Leaves a model and the random states as they were, whatever is done with them meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor, nn


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put buffers, training modes and random states back, bitwise and in place, whatever happens inside."""
    modes = [(module, module.training) for module in model.modules()]
    rng, buffers = RandomState.of(device), Buffers.of(model)
    python, legacy_numpy = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        rng.restore()
        buffers.restore()
        random.setstate(python)
        numpy.random.set_state(legacy_numpy)
        for module, training in modes:
            module.training = training


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """torch's random states, of the CPU and of one device, at one moment."""

    device: torch.device
    cpu_state: Tensor
    device_state: Tensor | None

    @staticmethod
    def of(device: torch.device) -> RandomState:
        """The states now."""
        return RandomState(device=device, cpu_state=torch.get_rng_state(), device_state=_device_rng(device))

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self.cpu_state)
        if self.device_state is not None:
            torch.get_device_module(self.device).set_rng_state(self.device_state, *_index(self.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """The buffers of a model at one moment: which there are, and what they hold."""

    held: list[tuple[nn.Module, dict[str, Tensor | None]]]
    contents: list[tuple[Tensor, Tensor]]

    @staticmethod
    def of(model: nn.Module) -> Buffers:
        """The buffers now."""
        return Buffers(
            held=[(part, dict(part._buffers)) for part in model.modules()],
            contents=[(buffer, buffer.detach().clone()) for buffer in model.buffers()],
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Put contents back in place, and take away buffers that were not there."""
        for buffer, content in self.contents:
            buffer.copy_(content)
        for part, buffers in self.held:
            part._buffers.clear()
            part._buffers.update(buffers)


def _device_rng(device: torch.device) -> Tensor | None:
    if device.type == "cpu":
        return None
    state: Tensor = torch.get_device_module(device).get_rng_state(*_index(device))
    return state


def _index(device: torch.device) -> tuple[torch.device, ...]:
    """MPS has one device, and its functions take none."""
    return () if device.type == "mps" else (device,)
