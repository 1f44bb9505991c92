"""What the rest must know of models in shards, without importing what shards them: that takes torch a second."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from halfstep.distributed.group import Group

Number = TypeVar("Number", float, torch.Tensor)
Item = TypeVar("Item")


def is_sharded(module: nn.Module) -> bool:
    """Whether the model was sharded by `fully_shard`."""
    return hasattr(module, "set_requires_gradient_sync")


def in_step(feed: Iterator[tuple[Item, bool]], group: Group, *, everyone: bool) -> Iterator[tuple[Item, bool, bool]]:
    """As many micro-batches on every rank: a rank that has no more computes its first one again, which does not count.

    Args:
        feed: this rank's micro-batches, each with whether it is the last.
        group: all ranks.
        everyone: whether every rank has one; else a rank without gets another's.

    Yields:
        A micro-batch, whether it counts, and whether it is the last on all ranks.
    """
    item = next(feed, None)
    stand_in = item[0] if item is not None else None
    if not everyone:
        stand_in = group.first_in_step(stand_in, has_some=item is not None)
    while True:
        more = group.anybody_in_step(item is not None and not item[1])
        yield cast(Item, stand_in if item is None else item[0]), item is not None, not more
        if not more:
            return
        item = None if item is None or item[1] else next(feed)


def whole_state(module: nn.Module, group: Group) -> dict[str, torch.Tensor]:
    """The state of a sharded model in whole tensors, in the memory of rank 0, one tensor gathered at a time.

    Tied tensors stay one. Every rank calls it; on the others it is empty.
    """
    whole: dict[str, torch.Tensor] = {}
    first_names: dict[int, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        first = first_names.setdefault(id(value), name)
        gathered = value.detach().full_tensor() if first == name and hasattr(value, "full_tensor") else value.detach()
        if group.rank == 0:
            whole[name] = gathered.cpu() if first == name else whole[first]
    return whole


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
