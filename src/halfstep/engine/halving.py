"""Smaller micro-batches when memory runs out; the weights keep the result the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halfstep.engine.batch import num_samples, split
from halfstep.errors import DeviceError

CURE = "Use a smaller model, shorter samples, `checkpoint_activations=True`, or a lower precision."


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the host's allocator, had no memory for a tensor."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def parts_of(batch: Any, parts: int) -> list[tuple[Any, float]]:
    """The batch in parts, each with its share of the samples."""
    if parts == 1:
        return [(batch, 1.0)]
    whole = num_samples(batch)
    return [(part, num_samples(part) / whole) for part in split(batch, parts)]


def next_parts(batches: Sequence[Any], parts: int) -> int:
    """The next larger number of parts.

    Raises:
        DeviceError: the micro-batches are single samples already.
    """
    if not can_be_smaller(batches, parts):
        raise DeviceError(f"Out of memory with micro-batches of one sample ({_largest(batches)} split in {parts}). {CURE}")
    return parts * 2


def can_be_smaller(batches: Sequence[Any], parts: int) -> bool:
    """Whether more than `parts` parts would make any of the micro-batches smaller."""
    return parts < _largest(batches)


def _largest(batches: Sequence[Any]) -> int:
    return max((num_samples(batch) for batch in batches), default=1)
