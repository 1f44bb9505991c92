"""Which samples an update sees.

Global batch `g` of epoch `e` is a function of the seed, the epoch and `g` alone. Ranks and micro-batches only cut it
into pieces, so that another number of ranks, or another micro-batch, sees the same samples in the same updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

SEEDS_APART = 1_000_003
"""Epochs after which one seed's draws would come again under the next."""
MOST_DRAWS = 2**31
Indices = npt.NDArray[np.int64]

POOL_BATCHES = 50
"""Global batches that are sorted together: more of them pad less, and are less at random."""


def shuffled(num_samples: int, *, seed: int, epoch: int) -> Indices:
    """The order of an epoch: every sample once.

    It is drawn from the raw bits of a counter-based generator, which NumPy promises not to change.
    """
    bits = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_samples)
    return np.argsort(bits, kind="stable").astype(np.int64)


def grouped_by_length(lengths: Indices, *, seed: int, epoch: int, global_batch: int, pool: int = POOL_BATCHES) -> Indices:
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


class RankBatches:
    """The micro-batches of one rank, as lists of sample indices: a batch sampler for a `DataLoader`.

    A global batch is cut into chunks of `micro` samples, dealt to the ranks in turn. The last global batch of an epoch
    may be shorter: nothing is repeated and nothing dropped, and a rank may get fewer chunks or none.

    Args:
        num_samples: samples in the data set.
        global_batch: samples in an update, over all ranks.
        micro: samples in a micro-batch.
        seed: of the run.
        rank: this rank.
        ranks: how many there are.
        drop_tail: leave the shorter last global batch out.
        draws: whether sample `i` is `i + n * num_samples`, with another `n` for every seed and epoch, for samples of which a part
            is drawn anew.
        lengths: tokens of each sample, where samples of about the same length are to be together; `None` where not.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        global_batch: int,
        micro: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        drop_tail: bool = False,
        draws: bool = False,
        lengths: Indices | None = None,
    ) -> None:
        self.num_samples = num_samples - num_samples % global_batch if drop_tail else num_samples
        self.total_samples = num_samples
        self.global_batch, self.micro = global_batch, micro
        self.seed, self.rank, self.ranks = seed, rank, ranks
        self.lengths, self.draws = lengths, draws
        self.epoch, self._skipped = 0, 0

    def skip(self, micro_batches: int) -> None:
        """Leave out so many micro-batches of this rank in the next iteration."""
        self._skipped = micro_batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        """The rank's micro-batches in order."""
        skipped, self._skipped = self._skipped, 0
        yield from islice(self._all_pieces(), skipped, None)

    def _all_pieces(self) -> Iterator[list[int]]:
        order = self._order()[: self.num_samples] + self._first_number()
        for start in range(0, self.num_samples, self.global_batch):
            yield from self._pieces(order[start : start + self.global_batch])

    def _order(self) -> Indices:
        if self.lengths is None:
            return shuffled(self.total_samples, seed=self.seed, epoch=self.epoch)
        return grouped_by_length(self.lengths, seed=self.seed, epoch=self.epoch, global_batch=self.global_batch)

    def _first_number(self) -> int:
        """0 where nothing is drawn, and for held-out data, which has no epochs; else a multiple of the number of samples."""
        return self.total_samples * (1 + (self.seed * SEEDS_APART + self.epoch) % MOST_DRAWS) if self.draws else 0

    def _pieces(self, samples: Indices) -> Iterator[list[int]]:
        for start in range(self.rank * self.micro, len(samples), self.ranks * self.micro):
            yield samples[start : start + self.micro].tolist()

    def __len__(self) -> int:
        """Micro-batches of this rank in an epoch."""
        whole, tail = divmod(self.num_samples, self.global_batch)
        return whole * self._num_pieces(self.global_batch) + self._num_pieces(tail)

    def _num_pieces(self, samples: int) -> int:
        return len(range(self.rank * self.micro, samples, self.ranks * self.micro))
