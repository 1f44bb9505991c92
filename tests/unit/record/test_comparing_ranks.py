"""What only several ranks together show, from what each of them noted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from halfstep.events.vocabulary import Place, RunBegin
from halfstep.findings.finding import Finding
from halfstep.record.comparing import compared, denied, ranks_table, samples_table, unseen
from halfstep.record.ranks import Meter, Shared, Together
from halfstep.record.recorder import Recorder
from halfstep.record.samples import Coverage, Samples
from halfstep.record.telling import Heard


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


HERE = Place("train.py", 7)
NAMES = ("weight", "bias")


def rank(number: int, shared: Shared, samples: tuple[Coverage, ...] = ()) -> Heard:
    shared.names, shared.place = NAMES, HERE
    begun = ((RunBegin(),),)
    return Heard(rank=number, size=2, stretches=begun, files=frozenset(), updates=2, shared=shared, samples=samples)


def told(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(f.rule, f.severity.value, f.message) for f in findings]


def test_a_collective_with_differing_shapes_is_named_with_its_line() -> None:
    ranks = [
        rank(n, Shared(collectives=[Together("barrier", (), HERE), Together("all_reduce", ((4 + n,),), HERE)])) for n in (0, 1)
    ]
    assert told(compared(ranks)) == [
        ("ddp-unequal-shapes", "error", "`all_reduce` is given [[4]] on rank 0, [[5]] on rank 1"),
    ]


def test_ranks_that_are_at_different_collectives_are_not_compared_by_shape() -> None:
    kinds = ("all_reduce", "broadcast")
    assert compared([rank(n, Shared(collectives=[Together(kinds[n], ((n,),), HERE)])) for n in (0, 1)]) == []


def test_batches_of_differing_sizes_are_told_and_sequences_of_differing_lengths_are_not() -> None:
    ranks = [rank(n, Shared(inputs=[(n, (8, 5 + n)), (n + 2, (8 - n, 5))])) for n in (0, 1)]
    message = "the batch of training pass 2 holds 8 on rank 0, 7 on rank 1: an average over ranks weighs these samples unequally"
    assert told(compared(ranks)) == [("ddp-unequal-shapes", "info", message)]


@pytest.mark.parametrize(
    ("idle", "expected"),
    [
        (NAMES, ("warning", "rank 1 brings no gradient but zeros to any parameter, others do")),
        (("bias",), ("info", "rank 1 brings no gradient but zeros to 1 of 2 parameters, first `bias`, others do")),
        ((), None),
    ],
)
def test_a_rank_that_brings_nothing_to_the_reduction_is_named(idle: tuple[str, ...], expected: tuple[str, str] | None) -> None:
    ranks = [rank(0, Shared(idle=[frozenset(), frozenset()])), rank(1, Shared(idle=[frozenset(idle)] * 2))]
    found = [("ddp-zero-gradients", s, f"in each of the first 2 updates {m}") for s, m in ([expected] if expected else [])]
    assert told(compared(ranks)) == found


def test_what_the_ranks_did_not_show_is_denied() -> None:
    ranks = [rank(n, Shared(backwards=3, random=[(0, n)], missing=[()])) for n in (0, 1)]
    assert denied(ranks) == {"ddp-uneven-inputs", "ddp-same-seed", "ddp-unused-params"}
    assert denied([replace(ranks[0], ending="it was ended from outside"), ranks[1]]) == {"ddp-same-seed", "ddp-unused-params"}
    assert denied(ranks[:1]) == set()


def test_gradients_are_noted_per_rank_before_the_reduction_and_reductions_are_counted(process_group: None) -> None:
    recorder = Recorder()
    meter = Meter(recorder)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter.joined_group(0, 2)
    for _ in range(5):
        optimizer.zero_grad()
        for micro in range(2):
            model.require_backward_grad_sync = micro == 1
            meter.forward_begins(model, (torch.ones(3, 2),))
            model(torch.tensor([[0.0, 1.0]] * 3)).sum().mul(0.0 if micro else 1.0).backward()
        optimizer.step()
        meter.update_ended(optimizer, None)
    assert (meter.shared.idle, meter.shared.forwards, meter.shared.reducing) == ([frozenset()] * 4, 10, 5)
    assert not any(p._backward_hooks for p in model.parameters())
    table = ranks_table([replace(rank(n, meter.shared), updates=5) for n in (0, 1)])
    assert table is not None
    assert table.rows[0][3:6] == ("1 an update", "0 an update", "0 of 2")


def coverage(loader: DataLoader[torch.Tensor], passes: list[list[int]]) -> tuple[Coverage, ...]:
    samples = Samples()
    for indices in passes:
        samples.handed_out(loader, HERE, indices)
        samples.handed_out(loader, HERE, None)
    return tuple(samples.coverages)


@pytest.mark.parametrize(
    ("drop_last", "severity"),
    [(True, "info"), (False, "warning")],
)
def test_samples_that_are_handed_out_in_no_pass_are_named_by_index(drop_last: bool, severity: str) -> None:
    data = TensorDataset(torch.arange(7.0))
    loader = DataLoader(data, batch_size=3, drop_last=drop_last)
    heard = replace(rank(0, Shared(), coverage(loader, [[0, 1, 2, 3, 4, 5]] * 2)), rank=None, size=1)
    message = "1 of 7 samples were handed out in none of 2 passes: 6"
    assert told(list(unseen([heard]))) == [("data-samples-unseen", severity, message)]
    table = samples_table([heard])
    assert table is not None
    assert table.rows == (("line 7", "7", "2", "1", "0"),)


def test_ranks_see_a_data_set_together() -> None:
    data = TensorDataset(torch.arange(6.0))
    loaders = [DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=n)) for n in (0, 1)]
    ranks = [rank(n, Shared(), coverage(loader, [[n, n + 2, n + 4]] * 2)) for n, loader in enumerate(loaders)]
    assert list(unseen(ranks)) == []
    assert list(unseen([ranks[0]])) == []  # a rank alone says nothing of the whole


def test_a_sampler_that_draws_as_it_likes_is_not_followed() -> None:
    data = TensorDataset(torch.arange(4.0))
    assert coverage(DataLoader(data, sampler=WeightedRandomSampler([1.0] * 4, 4)), [[0, 0, 1]] * 2) == ()
