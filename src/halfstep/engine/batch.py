"""Micro-batches of any shape: moved, measured, split and searched for values that are not finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch


def map_tensors(batch: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same nesting of mappings, sequences and dataclasses with every tensor changed; the rest is left as it is."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        changed = {key: map_tensors(value, change) for key, value in batch.items()}
        return changed if type(batch) is dict else _rebuilt(batch, changed)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(value, change) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = (field.name for field in dataclasses.fields(batch))
        return dataclasses.replace(batch, **{name: map_tensors(getattr(batch, name), change) for name in fields})
    return batch


def _rebuilt(batch: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    try:
        return type(batch)(changed)  # type: ignore[call-arg]
    except TypeError:
        return changed


def tensors(batch: Any, path: str = "batch") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor with the expression that reaches it, such as `batch["labels"]`."""
    if isinstance(batch, torch.Tensor):
        yield path, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from tensors(value, f"{path}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        for index, value in enumerate(batch):
            yield from tensors(value, f"{path}[{index}]")
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from tensors(getattr(batch, field.name), f"{path}.{field.name}")


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on `device`; copies from pinned memory do not wait."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def num_samples(batch: Any) -> int:
    """Length of the first dimension of the first tensor that has one; 1 where there is none."""
    first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if isinstance(first, torch.Tensor) and first.dim():
        return len(first)
    return next((len(tensor) for _, tensor in tensors(batch) if tensor.dim()), 1)


def split(batch: Any, parts: int) -> list[Any]:
    """The batch in at most `parts` runs of samples, as even as they can be.

    Tensors whose first dimension is not the number of samples go to every part whole.
    """
    samples = num_samples(batch)
    parts = min(parts, samples)
    bounds = [samples * i // parts for i in range(parts + 1)]

    def run(begin: int, end: int) -> Any:
        return map_tensors(batch, lambda t: t[begin:end] if t.dim() and t.shape[0] == samples else t)

    return [run(begin, end) for begin, end in pairwise(bounds)]


def first_non_finite(batch: Any) -> str | None:
    """Where the first NaN or infinity stands, such as `batch['x'], sample 3`; None where all is finite."""
    for path, tensor in tensors(batch):
        if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
            continue
        if not tensor.dim():
            return path
        row = (~torch.isfinite(tensor)).flatten(1).any(1) if tensor.dim() > 1 else ~torch.isfinite(tensor)
        return f"{path}, sample {int(row.nonzero()[0])}"
    return None
