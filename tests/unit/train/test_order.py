"""The data order is a function of seed, epoch and global sample index alone."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from halfstep.train.order import RankBatches, shuffled


def global_batches(num_samples: int, *, global_batch: int, micro: int, ranks: int, epoch: int = 0) -> list[list[int]]:
    """What all ranks together see in each update, in the order of the global batch."""
    feeds = []
    for rank in range(ranks):
        batches = RankBatches(num_samples, global_batch=global_batch, micro=micro, seed=3, rank=rank, ranks=ranks)
        batches.set_epoch(epoch)
        feeds.append(list(batches))
    window = global_batch // (micro * ranks)
    count = -(-num_samples // global_batch)
    return [
        [sample for step in range(window) for feed in feeds for sample in chain(*feed[g * window + step :][:1])]
        for g in range(count)
    ]


@given(
    num_samples=st.integers(1, 80),
    micro=st.integers(1, 4),
    window=st.integers(1, 3),
    ranks=st.integers(1, 3),
    epoch=st.integers(0, 3),
)
def test_any_split_sees_the_same_samples_in_the_same_updates(
    num_samples: int, micro: int, window: int, ranks: int, epoch: int
) -> None:
    size = micro * window * ranks
    split = global_batches(num_samples, global_batch=size, micro=micro, ranks=ranks, epoch=epoch)
    whole = global_batches(num_samples, global_batch=size, micro=size, ranks=1, epoch=epoch)
    assert split == whole


@given(num_samples=st.integers(1, 200), epoch=st.integers(0, 5))
def test_an_epoch_holds_every_sample_once(num_samples: int, epoch: int) -> None:
    assert sorted(shuffled(num_samples, seed=1, epoch=epoch).tolist()) == list(range(num_samples))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(shuffled(50, seed=seed, epoch=epoch).tolist()) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


def test_the_order_never_changes_between_versions() -> None:
    assert shuffled(8, seed=0, epoch=0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]


def test_the_length_is_the_number_of_micro_batches() -> None:
    for rank in (0, 1):
        batches = RankBatches(13, global_batch=8, micro=2, seed=0, rank=rank, ranks=2)
        assert len(batches) == len(list(batches))


def test_a_dropped_tail_is_left_out_of_every_epoch() -> None:
    batches = RankBatches(13, global_batch=4, micro=4, seed=0, drop_tail=True)
    assert [len(batch) for batch in batches] == [4, 4, 4]


def test_ranks_may_be_uneven_and_one_may_get_nothing() -> None:
    lengths = [len(RankBatches(9, global_batch=8, micro=2, seed=0, rank=rank, ranks=2)) for rank in (0, 1)]
    assert lengths == [3, 2]
