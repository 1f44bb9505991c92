"""Documents of tokens, of any lengths, as spans of one long array that may lie on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from halfstep.config.options import TooLong
from halfstep.errors import DataError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Spans of tokens.

    Attributes:
        tokens: all tokens, one document behind the other.
        counted: for each token whether it is to be predicted.
        starts: where in `tokens` each document begins.
        lengths: tokens of each.
        labels: for each document, the place of its label in `label_names`; `None` where documents have none.
        label_names: the labels that there are.
    """

    tokens: npt.NDArray[np.generic]
    counted: npt.NDArray[np.bool_]
    starts: Ints
    lengths: Ints
    labels: Ints | None = None
    label_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    def chosen(self, which: npt.NDArray[Any]) -> Documents:
        """The documents at these places, or where this is true."""
        labels = None if self.labels is None else self.labels[which]
        return replace(self, starts=self.starts[which], lengths=self.lengths[which], labels=labels)

    def num_predicted(self) -> Ints:
        """For each document, how many of its tokens are predicted: the first never is."""
        flags = np.asarray(self.counted)  # a plain view: a mapped array is slow to cut
        spans = zip((self.starts + 1).tolist(), (self.starts + self.lengths).tolist(), strict=True)
        counts = (np.count_nonzero(flags[begin:end]) for begin, end in spans)
        return np.fromiter(counts, dtype=np.int64, count=len(self))


def documents_of(pieces: Sequence[Sequence[int]], counted: Sequence[Sequence[bool]] | None = None) -> Documents:
    """Documents of these tokens; without `counted` all of them count."""
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    tokens = np.fromiter((token for piece in pieces for token in piece), dtype=np.int64, count=int(lengths.sum()))
    flags = np.ones(len(tokens), dtype=np.bool_)
    if counted is not None:
        flags = np.fromiter((flag for piece in counted for flag in piece), dtype=np.bool_, count=len(tokens))
    return Documents(tokens=tokens, counted=flags, starts=np.cumsum(lengths) - lengths, lengths=lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Documents that fit into a sequence, and what that cost.

    Attributes:
        documents: those that are used.
        length: tokens of a sequence.
        given: how many documents there were.
        too_long: how many were longer than a sequence.
        how: what became of those.
        without_answer: documents left out because none of their tokens is predicted.
        lost_tokens: tokens that are not used.
        given_tokens: tokens that there were.
    """

    documents: Documents
    length: int
    given: int
    too_long: int
    how: TooLong
    without_answer: int
    lost_tokens: int
    given_tokens: int

    def __str__(self) -> str:
        done = {TooLong.CUT: "cut", TooLong.DROP: "dropped", TooLong.SPLIT: "split"}[self.how]
        told = [f"{self.too_long:,} of {self.given:,} documents are longer than {self.length:,} tokens and were {done}"]
        if self.without_answer:
            told.append(f"{self.without_answer:,} have no token to predict and were left out")
        told.append(f"{self.lost_tokens / max(1, self.given_tokens):.1%} of {self.given_tokens:,} tokens are not used")
        return "; ".join(told)


def fit(documents: Documents, length: int, how: TooLong) -> Fitted:
    """The documents, none longer than `length` and each with a token to predict.

    Raises:
        DataError: nothing is left.
    """
    short = shortened(documents, length, how)
    predicted = short.num_predicted() > 0
    return fitted_of(documents, short if predicted.all() else short.chosen(predicted), length, how, len(short))


def shortened(documents: Documents, length: int, how: TooLong) -> Documents:
    """The documents, none longer than `length`."""
    return {TooLong.CUT: _cut, TooLong.DROP: _drop, TooLong.SPLIT: _split}[how](documents, length)


def fitted_of(given: Documents, kept: Documents, length: int, how: TooLong, num_short: int) -> Fitted:
    """What became of the documents that were given.

    Raises:
        DataError: nothing is left.
    """
    fitted = Fitted(
        documents=kept,
        length=length,
        given=len(given),
        too_long=int((given.lengths > length).sum()),
        how=how,
        without_answer=num_short - len(kept),
        lost_tokens=given.num_tokens - kept.num_tokens,
        given_tokens=given.num_tokens,
    )
    if len(kept) == 0:
        raise DataError(f"No document is left to train on: {fitted}. Use a larger `data.sequence_length`, or other data.")
    return fitted


def _cut(documents: Documents, length: int) -> Documents:
    return replace(documents, lengths=np.minimum(documents.lengths, length))


def _drop(documents: Documents, length: int) -> Documents:
    return documents.chosen(documents.lengths <= length)


def _split(documents: Documents, length: int) -> Documents:
    parts = np.maximum(1, -(-documents.lengths // length))
    which = np.repeat(np.arange(len(documents)), parts)
    number = np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)
    lengths = np.minimum(length, documents.lengths[which] - number * length)
    return replace(documents, starts=documents.starts[which] + number * length, lengths=lengths)
