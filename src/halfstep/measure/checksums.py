"""Numbers that tell tensors apart without reading them on the host."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """The sum of the bits of each tensor, as integers of its elements' size (8 bytes at most), read once for all."""
    flat = [tensor.detach().contiguous().view(-1) for tensor in tensors]
    sums = [each.view(_SAME_SIZE[min(each.element_size(), 8)]).sum(dtype=torch.int64) for each in flat]
    return tuple(torch.stack([each.cpu() for each in sums]).tolist()) if sums else ()
