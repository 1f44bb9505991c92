"""The states of the random generators of this process, as JSON types."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


def randomness(device: torch.device) -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, and of the device's; waits for the device."""
    states = host_randomness()
    if device.type != "cpu":
        states["device"] = _as_text(torch.get_device_module(device).get_rng_state(device))
    return states


def set_randomness(states: dict[str, Any], device: torch.device) -> None:
    """Take up states of `randomness`, those of the device where it is of the same kind."""
    set_host_randomness(states)
    if "device" in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(_as_state(states["device"]), device)


HostStates = tuple[Any, Any, torch.Tensor]
"""The states of Python's, NumPy's and torch's own generators as these give them: taken in some 15 us."""


def host_states() -> HostStates:
    """The states of Python's, NumPy's and torch's own generators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def host_randomness(states: HostStates | None = None) -> dict[str, Any]:
    """States of `host_states`, by default those of now, as JSON types."""
    (version, numbers, gauss), (kind, keys, *rest), of_torch = states or host_states()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": _as_text(of_torch),
    }


def set_host_randomness(states: dict[str, Any]) -> None:
    """Take up states of `host_randomness`."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_as_state(states["torch"]))


def generator_states(generators: Iterable[torch.Generator]) -> list[str]:
    """The states of generators."""
    return [_as_text(generator.get_state()) for generator in generators]


def set_generator_states(generators: Iterable[torch.Generator], states: Iterable[str]) -> None:
    """Take up states of `generator_states`."""
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(_as_state(state))


def _as_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _as_state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
