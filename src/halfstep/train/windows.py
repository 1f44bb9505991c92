"""Sequences of tokens as a data set that hands out whole batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from halfstep.config.horizon import num_windows
from halfstep.train.corpus import Tokens
from halfstep.train.loss import IGNORED

Batch = dict[str, torch.Tensor]


class Windows(Dataset[Batch]):
    """A text cut into sequences of equal length.

    Neighbours share one token, so that every token of the text but its first is predicted exactly once. The last
    sequence is filled up with tokens that are not to be predicted and that causal attention lets nobody see.

    Args:
        tokens: the text.
        length: tokens in a sequence.
    """

    def __init__(self, tokens: Tokens, length: int) -> None:
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        """The number of sequences."""
        return num_windows(len(self.tokens), self.length)

    @property
    def num_predicted(self) -> int:
        """Tokens that are predicted in all sequences."""
        return max(0, len(self.tokens) - 1)

    def __getitem__(self, index: int) -> Batch:
        """One sequence, as a batch of one."""
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The sequences as one batch: `input_ids` and `labels`, both of shape (sequences, length)."""
        starts = np.asarray(indices, dtype=np.int64)[:, None] * (self.length - 1)
        places = starts + np.arange(self.length)
        inside = places < len(self.tokens)
        inputs = self.tokens[np.minimum(places, len(self.tokens) - 1)].astype(np.int64)
        return {
            "input_ids": torch.from_numpy(inputs),
            "labels": torch.from_numpy(np.where(inside, inputs, IGNORED)),
        }


def as_it_is(batch: Any) -> Any:
    """The collate function for batches that are whole already."""
    return batch
