"""What the rest must know of models in shards, without importing what shards them: that takes torch a second."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

Number = TypeVar("Number", float, torch.Tensor)


def is_sharded(module: nn.Module) -> bool:
    """Whether the model was sharded by `fully_shard`."""
    return hasattr(module, "set_requires_gradient_sync")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a sharded tensor (a DTensor), in the same memory; any other tensor itself."""
    detached: Any = tensor.detach() if hasattr(tensor, "to_local") else None
    return tensor if detached is None else cast(torch.Tensor, detached.to_local())


def norm_over_shards(norm: Number) -> Number:
    """The norm of what all ranks hold, from the norm of this one's shards; every rank calls it."""
    if isinstance(norm, torch.Tensor):
        squares = norm.double().square()
        dist.all_reduce(squares)
        return squares.sqrt().to(norm.dtype)
    square = torch.tensor(norm * norm, dtype=torch.float64)
    dist.all_reduce(square)
    return float(square.sqrt())
