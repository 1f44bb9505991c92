"""Documents side by side in sequences without padding, kept apart in attention and positions.

A sequence's `position_ids` begin anew with every document. That is all that a model of transformers needs to keep
documents apart: from positions that do not go up by one it makes a causal mask in blocks. A model that does not is found
by `mixes_documents`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import Dataset

from halfstep.precision.untouched import untouched
from halfstep.train.documents import Documents, Ints
from halfstep.train.loss import IGNORED
from halfstep.train.windows import Batch

POOL_DOCUMENTS = 65_536
"""Documents that are packed with one another: more would hardly pack closer, and take longer to sort."""
PROBE_TOKENS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """How much of what goes through the model is there to fill it up.

    Attributes:
        tokens: places that hold a token of a document.
        places: all places.
    """

    tokens: int
    places: int

    @property
    def share(self) -> float:
        """Of the places, those that hold padding."""
        return 1 - self.tokens / max(1, self.places)

    def __str__(self) -> str:
        return f"{self.share:.1%} of {self.places:,} places are padding"


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Which documents go into one sequence: the longest first, each where the least room is left that it fits in.

    No more sequences than 11/9 of the fewest possible and one (Johnson 1973). The room is looked up in a set of bits, so
    that a document costs about the same however many sequences are open.

    Args:
        lengths: tokens of each document, each at least 1 and at most `capacity`.
        capacity: tokens of a sequence.
    """
    assert all(0 < length <= capacity for length in lengths)
    packs: list[list[int]] = []
    by_room: list[list[list[int]]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = rooms >> lengths[index]
        if fitting:
            room = lengths[index] + (fitting & -fitting).bit_length() - 1
            pack = by_room[room].pop()
            rooms ^= 0 if by_room[room] else 1 << room
        else:
            room, pack = capacity, []
            packs.append(pack)
        pack.append(index)
        room -= lengths[index]
        by_room[room].append(pack)
        rooms |= (1 << room) if room else 0
    return packs


def pack(lengths: Ints, capacity: int, *, pool: int = POOL_DOCUMENTS) -> list[Ints]:
    """`best_fit` of each `pool` documents in their order, as the indices of all of them."""
    packs: list[Ints] = []
    for start in range(0, len(lengths), pool):
        found = best_fit(lengths[start : start + pool].tolist(), capacity)
        packs += [np.array(each, dtype=np.int64) + start for each in found]
    return packs


class Packed(Dataset[Batch]):
    """Sequences of whole documents, as a data set that hands out whole batches.

    Which documents share a sequence stays the same over the epochs; the order of the sequences need not.

    Args:
        documents: none longer than `length`.
        length: tokens of a sequence.
        packs: the documents of each sequence; `None` for those of `pack`.
    """

    def __init__(self, documents: Documents, length: int, packs: Sequence[Ints] | None = None) -> None:
        self.documents = documents
        self.packs = pack(documents.lengths, length) if packs is None else packs
        self.padding = Padding(tokens=documents.num_tokens, places=len(self.packs) * length)

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.packs)

    @property
    def num_predicted(self) -> int:
        """Tokens that are predicted in all sequences."""
        return int(self.documents.num_predicted().sum())

    def __getitem__(self, index: int) -> Batch:
        """One sequence, as a batch of one."""
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The sequences as one batch, as long as the longest: `input_ids`, `labels` and `position_ids`."""
        return laid_out(self.documents, [self.packs[index] for index in indices])


def laid_out(documents: Documents, rows: Sequence[Ints]) -> Batch:
    """The documents of each row side by side, with positions that begin anew; what is left of a row is filled up.

    The first token of a document is not predicted: what stands before it has nothing to do with it. The filling is a
    document of its own without labels.
    """
    which = np.concatenate(rows)
    lengths = documents.lengths[which]
    filled = np.array([documents.lengths[row].sum() for row in rows])
    row_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    before = np.cumsum(lengths) - lengths
    position = np.arange(lengths.sum()) - np.repeat(before, lengths)
    column = before - (np.cumsum(filled) - filled)[row_of]
    width = int(filled.max())
    place = np.repeat(row_of * width + column, lengths) + position
    source = np.repeat(documents.starts[which], lengths) + position
    tokens = documents.tokens[source].astype(np.int64)
    labels = np.where(documents.counted[source] & (position > 0), tokens, IGNORED)
    positions = np.maximum(0, np.arange(width) - filled[:, None])
    return {
        "input_ids": _filled(np.zeros((len(rows), width), dtype=np.int64), place, tokens),
        "labels": _filled(np.full((len(rows), width), IGNORED, dtype=np.int64), place, labels),
        "position_ids": _filled(positions, place, position),
    }


def _filled(array: npt.NDArray[np.int64], place: Ints, values: Ints) -> torch.Tensor:
    array.reshape(-1)[place] = values
    return torch.from_numpy(array)


def mixes_documents(model: nn.Module, vocabulary: int) -> str | None:
    """What keeps `model` from telling packed documents apart, or `None` where it does tell them apart.

    It is tried on a few tokens, without a trace in the model or the random states: a document's logits must not depend on
    the document before it, and must be those that it has alone.
    """
    device = next(model.parameters()).device
    first, other, second = (torch.arange(PROBE_TOKENS, device=device) * step % vocabulary for step in (1, 2, 3))
    positions = torch.arange(PROBE_TOKENS, device=device).repeat(2)[None]
    with untouched(model, device), torch.no_grad():
        model.eval()
        try:
            beside = [_logits(model, torch.cat([before, second]), positions)[PROBE_TOKENS:] for before in (first, other)]
        except TypeError:
            return f"{type(model).__name__} takes no `position_ids`"
        alone = _logits(model, second, None)
    if not torch.equal(*beside):
        return f"{type(model).__name__} lets a document see the one before it"
    if not torch.allclose(beside[0], alone, rtol=1e-3, atol=1e-3 * float(alone.abs().max())):
        return f"{type(model).__name__} gives a document other positions than it has alone"
    return None


def _logits(model: nn.Module, tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    arguments: dict[str, Any] = {} if positions is None else {"position_ids": positions}
    logits: torch.Tensor = model(input_ids=tokens[None], use_cache=False, **arguments).logits[0].float()
    return logits
