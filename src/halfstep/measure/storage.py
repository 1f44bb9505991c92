"""The bytes of every tensor that lives during some work, counted as storages are made and freed; no device is asked."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GRANULARITY = 512
"""CUDA's caching allocator rounds every request up to this."""


class StorageCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered: how many bytes of storage are alive, and how many there were after each operation.

    Works on real and on fake tensors. What existed before is counted when it is given to `count`. Views and tensors that share
    a storage count once; a storage counts until the last of its tensors is gone, as in an allocator.

    Args:
        granularity: bytes to which each storage is rounded up.
    """

    def __init__(self, granularity: int = GRANULARITY) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive_bytes = 0
        self.history: list[int] = []
        self._granularity = granularity
        self._seen: dict[int, weakref.ref[Any]] = {}

    def count(self, value: object) -> None:
        """Count the storages of the tensors in `value`, a tensor or a tree of them."""
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(result)
        self.history.append(self.alive_bytes)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        known = self._seen.get(key)
        if known is not None and known() is storage:
            return
        size = -(-storage.nbytes() // self._granularity) * self._granularity
        self._seen[key] = weakref.ref(storage, self._forget(key, size))
        self.alive_bytes += size

    def _forget(self, key: int, size: int) -> Callable[[object], None]:
        def forget(_: object) -> None:
            self.alive_bytes -= size
            self._seen.pop(key, None)

        return forget
