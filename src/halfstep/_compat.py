"""The one place that asks for torch's version, and the names that moved between versions."""

from __future__ import annotations

import torch

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
"""Major and minor version of the torch that is installed."""

CAST_CACHE_SURVIVES_NO_GRAD = TORCH >= (2, 13)
"""Whether a forward under `no_grad` leaves autocast's cached weights their gradients.

Fixed in December 2025 (pytorch pull request 165068) and seen fixed in 2.13; before, one autocast context a micro-batch is safe.
"""


def accelerator_device() -> torch.device:
    """The device type that torch would compute on here: CUDA, ROCm, XPU or MPS where there is one, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found if found is not None else torch.device("cpu")
