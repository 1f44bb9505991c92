"""Many tensors in few collectives: laid end to end in buckets, sent, and copied back.

Every rank calls these with tensors of the same shapes and dtypes in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

BUCKET_BYTES = 25 * 2**20
"""About how much goes into one collective: DDP's own default."""

_Bucket = list[torch.Tensor]


def sum_over_ranks(tensors: Iterable[torch.Tensor]) -> None:
    """Sum each tensor over the ranks, in place."""
    _exchange(tensors, lambda flat: dist.all_reduce(flat, async_op=True))


def copy_from_first(tensors: Iterable[torch.Tensor]) -> None:
    """Give each tensor the value that it has on rank 0, in place; as bytes, since not every backend knows every dtype."""
    _exchange(tensors, lambda flat: dist.broadcast(flat.view(torch.uint8), src=0, async_op=True))


@torch.no_grad()
def _exchange(tensors: Iterable[torch.Tensor], start: Callable[[torch.Tensor], Any]) -> None:
    """One bucket is laid out while the one before it is on its way."""
    under_way: tuple[_Bucket, torch.Tensor, Any] | None = None
    for bucket in buckets_of(tensors):
        flat = _flat(bucket)
        work = start(flat)
        if under_way is not None:
            _arrive(*under_way)
        under_way = bucket, flat, work
    if under_way is not None:
        _arrive(*under_way)


def buckets_of(tensors: Iterable[torch.Tensor]) -> Iterator[_Bucket]:
    """The tensors that hold something, in buckets of one dtype on one device."""
    kinds: dict[tuple[torch.dtype, torch.device], _Bucket] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for kind in kinds.values():
        yield from _filled(kind)


def _filled(tensors: Sequence[torch.Tensor]) -> Iterator[_Bucket]:
    bucket: _Bucket = []
    held = 0
    for tensor in tensors:
        if bucket and held + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.nbytes
    yield bucket


def _is_flat(bucket: _Bucket) -> bool:
    """Whether the bucket is one tensor that can be sent from where it is."""
    return len(bucket) == 1 and bucket[0].is_contiguous()


def _flat(bucket: _Bucket) -> torch.Tensor:
    return bucket[0].view(-1) if _is_flat(bucket) else torch.cat([tensor.reshape(-1) for tensor in bucket])


def _arrive(bucket: _Bucket, flat: torch.Tensor, work: Any) -> None:
    work.wait()
    if _is_flat(bucket):
        return
    for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(part.view(tensor.shape))
