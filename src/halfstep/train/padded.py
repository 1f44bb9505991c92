"""Documents of about the same length in one batch, filled up to its longest: for models that cannot take packed ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch.utils.data import Dataset

from halfstep.train.documents import Documents, Ints
from halfstep.train.packing import Padding, laid_out
from halfstep.train.windows import Batch


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

    @property
    def lengths(self) -> Ints:
        """Tokens of each document."""
        return self.documents.lengths

    @property
    def num_predicted(self) -> int:
        """Tokens that are predicted in all sequences."""
        return int(self.documents.num_predicted().sum())

    def __getitem__(self, index: int) -> Batch:
        """One document, as a batch of one."""
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The documents as one batch: `input_ids` and `labels`, without a mask, which would cost a faster kernel."""
        batch = laid_out(self.documents, [np.array([index]) for index in indices])
        return {key: batch[key] for key in ("input_ids", "labels")}


def padding_of(lengths: Ints, batches: Iterable[Sequence[int]]) -> Padding:
    """The padding of these batches, each filled up to its longest document."""
    tokens = places = 0
    for batch in batches:
        own = lengths[np.asarray(batch, dtype=np.int64) % len(lengths)]  # a number may be that of another draw of a sample
        tokens += int(own.sum())
        places += int(own.max()) * len(own)
    return Padding(tokens=tokens, places=places)
