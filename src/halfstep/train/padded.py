"""Documents of about the same length in one batch, filled up to its longest: for models that cannot take packed ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch.utils.data import Dataset

from halfstep.train.documents import Documents, Ints
from halfstep.train.order import shuffled
from halfstep.train.packing import Padding, laid_out
from halfstep.train.windows import Batch

POOL_BATCHES = 50
"""Global batches that are sorted together: more of them pad less, and are less at random."""


class Padded(Dataset[Batch]):
    """One document a row, filled up on the right, where causal attention lets no token see it.

    Args:
        documents: none longer than a sequence may be.
    """

    def __init__(self, documents: Documents) -> None:
        self.documents = documents

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.documents)

    def __getitem__(self, index: int) -> Batch:
        """One document, as a batch of one."""
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The documents as one batch: `input_ids` and `labels`, without a mask, which would cost a faster kernel."""
        batch = laid_out(self.documents, [np.array([index]) for index in indices])
        return {key: batch[key] for key in ("input_ids", "labels")}


def grouped_by_length(lengths: Ints, *, seed: int, epoch: int, global_batch: int, pool: int = POOL_BATCHES) -> Ints:
    """The order of an epoch in which neighbours are about as long as each other: every document once.

    The documents are shuffled, each `pool` global batches of them sorted by length, and the full global batches shuffled:
    which samples an update sees is a function of seed and epoch alone, as without grouping.
    """
    order = shuffled(len(lengths), seed=seed, epoch=epoch)
    size = pool * global_batch
    pools = [order[start : start + size] for start in range(0, len(order), size)]
    by_length = np.concatenate([pool[np.argsort(lengths[pool], kind="stable")] for pool in pools] or [order])
    full = len(by_length) // global_batch * global_batch
    batches = by_length[:full].reshape(-1, global_batch)
    again = shuffled(len(batches), seed=seed + 1, epoch=epoch)
    return np.concatenate([batches[again].reshape(-1), by_length[full:]])


def padding_of(lengths: Ints, batches: Iterable[Sequence[int]]) -> Padding:
    """The padding of these batches, each filled up to its longest document."""
    tokens = places = 0
    for batch in batches:
        own = lengths[np.asarray(batch, dtype=np.int64)]
        tokens += int(own.sum())
        places += int(own.max()) * len(own)
    return Padding(tokens=tokens, places=places)
