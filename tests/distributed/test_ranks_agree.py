"""What all ranks must agree on, and do: weights, buffers, schedules, verdicts and the end of a run."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel

from distributed.conftest import Both
from distributed.jobs import LOW_SCALE, Deal, Job, batch_of, mine, train
from halfstep import Engine
from halfstep.errors import RunStopped
from halfstep.precision.scaler import ScalerSettings
from parity.by_hand import (
    as_if_on_a_device,
    assert_bitwise,
    assert_near,
    cut,
    mean_loss,
    samples,
    state,
    tiny_model,
    weighted_loss,
)

RAGGED = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0, 5.0, 8.0]
DEAL: Deal = [[[0, 1], [2], [3]], [[4], [5, 6]]]
BAD = float("inf")
on_both_paths = pytest.mark.parametrize("on_host", [True, False], ids=["as on a CPU", "as on a device"])


def plateaus(metrics: list[list[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    """The averages and the learning rates after each of this rank's metrics, given with their weights."""
    model = tiny_model()
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    engine = Engine(model, optimizer, loss=weighted_loss, scheduler=scheduler, precision="fp32")
    averages, rates = [], []
    for metric, weight in metrics[dist.get_rank()]:
        averages.append(engine.plateau(metric, weight))
        rates.append(optimizer.param_groups[0]["lr"])
    return averages, rates


def test_plateau_schedulers_see_the_weighted_average_of_all_ranks(both: Both) -> None:
    """By its own metric rank 0 would never lower its rate, and rank 1 always."""
    first, second = both(plateaus, [[(3.0, 1.0), (2.0, 1.0), (1.0, 3.0)], [(1.0, 1.0), (2.5, 1.0), (3.0, 1.0)]])
    assert first == second
    assert first == ([2.0, 2.25, 1.5], [1.0, 0.5, 0.5])


def train_with_batch_norm(late: bool) -> list[dict[str, Any]]:
    """The buffers after training, and after rank 0's were given to all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model.register_buffer("flags", torch.tensor([dist.get_rank() == 0, True]))
    model.register_buffer("phase", torch.full((2,), complex(dist.get_rank(), 1)))
    model.register_buffer("table", torch.full((3, 2), float(dist.get_rank())).T)
    model.register_buffer("nothing", torch.empty(0, 3))
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=weighted_loss, precision="fp32", find_unused_parameters=late)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for _ in range(3):
        engine.update(cut(samples(8, seed=10 + dist.get_rank()), [4, 4] if dist.get_rank() else [8]))
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    engine.group.broadcast_buffers(engine.module)
    return [before, after, {name: buffer.clone() for name, buffer in model.named_buffers()}]


@pytest.mark.parametrize("late", [False, True], ids=["in DDP", "late"])
def test_running_statistics_are_each_ranks_own_until_rank_0_gives_its_own_to_all(both: Both, late: bool) -> None:
    """Buffers of every dtype and layout start equal; no forward waits for them."""
    (start, first, given), (same, second, taken) = both(train_with_batch_norm, late)
    assert_bitwise(start, same)
    assert (first["1.num_batches_tracked"], second["1.num_batches_tracked"]) == (3, 6)
    assert not first["1.running_mean"].equal(second["1.running_mean"])
    assert_bitwise(given, taken)
    assert_bitwise(given, first)


def train_from_other_weights(late: bool) -> dict[str, Any]:
    """Ranks begin with other weights, some of them not contiguous."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(4, 2)).to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous() or model[0].weight.shape[1] == 1

    def loss(called: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        return called(x).square().sum(), len(x)

    engine = Engine(model, AdamW(model.parameters(), lr=0.1), loss=loss, precision="fp32", find_unused_parameters=late)
    for _ in range(3):
        engine.update([torch.randn(3, 1, 2, 2)])
    return state(model)


@pytest.mark.parametrize("late", [False, True], ids=["in DDP", "late"])
def test_ranks_start_from_rank_0s_weights(both: Both, late: bool) -> None:
    assert_bitwise(*both(train_from_other_weights, late))


def train_with_skips(on_host: bool) -> dict[str, Any]:
    model = tiny_model()
    optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
    scheduler, ema = StepLR(optimizer, step_size=1, gamma=0.5), AveragedModel(model)
    engine = Engine(
        model, optimizer, loss=weighted_loss, scheduler=scheduler, ema=ema, precision="fp16", scaler=LOW_SCALE, accumulate=2
    )
    engine = engine if on_host else as_if_on_a_device(engine)
    job = Job(windows=[], weights=RAGGED, factors={5: BAD})
    for deal in [DEAL, [[[0], [1]], [[2], [3]]], DEAL, [[[0]], [[1], [2]]]]:
        engine.update([batch_of(job, each) for each in mine(deal)])
    engine.settle()
    ledger = [(entry.index, entry.applied, entry.scale, entry.weight, entry.loss) for entry in engine.ledger if entry.applied]
    skips = [(entry.index, entry.applied, entry.scale) for entry in engine.ledger if not entry.applied]
    told = {"ledger": ledger, "skips": skips, "rate": scheduler.get_last_lr(), "steps": scheduler.last_epoch}
    return {**told, **state(model, optimizer), **state(ema), "scaler": engine.state_dict()["scaler"]}


@on_both_paths
def test_schedule_scale_average_and_ledger_are_equal_on_both_ranks_after_skips(both: Both, on_host: bool) -> None:
    first, second = both(train_with_skips, on_host)
    assert_bitwise(first, second)
    assert [index for index, *_ in first["skips"]] == [1, 3]
    assert (first["steps"], first["rate"]) == (2, [0.0025]), "one step an applied update, not one a process"
    assert first["scaler"] == {"scale": 2.0**8, "growth": 1}


def stop_by_skips(folder: str, on_host: bool, precision: str, look: bool) -> tuple[str, str, int]:
    """What a run says that cannot go on because of rank 1's data; rank 0 alone looks at every update, if any does."""
    model = tiny_model()
    scaler = ScalerSettings(init_scale=4.0, floor=2.0)
    evidence = Path(folder) / "evidence"
    engine = Engine(
        model,
        AdamW(model.parameters(), lr=0.01, fused=True),
        loss=weighted_loss,
        precision=precision,
        scaler=scaler,
        max_skips=2,
        evidence=evidence,
    )
    engine = engine if on_host else as_if_on_a_device(engine)
    job = Job(windows=[], weights=RAGGED, factors={5: BAD})
    made = 0
    try:
        while made < 9:
            update = engine.update([batch_of(job, each) for each in mine(DEAL)])
            made += 1
            if look and dist.get_rank() == 0:
                assert not update.applied
                engine.state_dict()
    except RunStopped as error:
        return type(error).__name__, str(error), made
    raise AssertionError("the run went on")


@on_both_paths
@pytest.mark.parametrize(("precision", "kind"), [("fp32", "TooManySkips"), ("fp16", "ScaleFloorReached")])
@pytest.mark.parametrize("look", [False, True], ids=["nobody looks", "rank 0 looks"])
def test_a_run_that_cannot_go_on_stops_on_all_ranks_in_the_same_update(
    both: Both, tmp_path: Path, on_host: bool, precision: str, kind: str, look: bool
) -> None:
    """Where flags arrive late, a rank that looks at an update early does not leave the others alone."""
    first, second = both(stop_by_skips, str(tmp_path), on_host, precision, look)
    assert (first[0], first[2]) == (second[0], second[2])
    assert first[0] == kind
    assert {path.name for path in (tmp_path / "evidence").iterdir()} == {
        f"update-{first[1].split('Stopped at update ')[1].split(':')[0]}-rank-{rank}.pt" for rank in (0, 1)
    }


def causes(bad: float) -> list[str | None]:
    """Why a window was skipped in which rank 1 was given something bad, in its data or in its loss alone."""
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=weighted_loss, precision="fp32")
    data, loss = samples(2), samples(2)
    if dist.get_rank() == 1:
        data, loss = replace(data, x=data.x * bad), loss.times(bad)
    return [engine.update([batch]).skipped_because for batch in (data, loss)]


def test_the_cause_of_a_skip_says_where_it_does_not_lie(both: Both) -> None:
    """Rank 0 writes the log, and must not look as if its own data were bad."""
    elsewhere = ", for what another rank was given"
    first, second = both(causes, BAD)
    assert first == [f"loss not finite: the loss is nan{elsewhere}", f"loss not finite: the loss is inf{elsewhere}"]
    assert second == ["data not finite: batch.x, sample 0 of micro-batch 1", "loss not finite: the loss is inf"]


def train_on_means(deals: list[Deal]) -> dict[str, Any]:
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, precision="fp32")
    job = Job(windows=[], weights=RAGGED)
    losses = [engine.update([batch_of(job, each) for each in mine(deal)]).loss for deal in deals]
    return {**state(model), "losses": torch.tensor(losses), "weight": engine.counters.weight}


def test_losses_that_are_means_count_as_one_each_on_whichever_rank(both: Both) -> None:
    deals: list[Deal] = [DEAL, DEAL, [[[0]], [[1, 2], [3], [4]]], DEAL]
    first, second = both(train_on_means, deals)
    assert_bitwise(first, second)
    assert first["weight"] == 19.0
    assert_near(first, train_on_means(deals), rtol=1e-5, atol=2e-6)


def test_weights_are_bitwise_equal_after_long_training(both: Both) -> None:
    job = Job(windows=[DEAL, [[], [[0, 1]]]] * 20, weights=RAGGED, optimizer="AdamW", given={"clip_norm": 0.1})
    first, second = both(train, job)
    assert_bitwise(first.state, second.state)


def train_texts(precision: str, lengths: list[list[int]], masked_rank: int | None) -> dict[str, Any]:
    """A tiny language model on texts of these lengths; on one rank every label may be masked."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))

    def loss(called: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = called(batch["ids"])[:, :-1].flatten(0, 1)
        labels = batch["labels"][:, 1:].flatten()
        return F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum"), (labels != -100).sum()

    engine = Engine(model, SGD(model.parameters(), lr=0.5), loss=loss, precision=precision, scaler=LOW_SCALE)
    ranks = [dist.get_rank()] if dist.is_initialized() else range(len(lengths))
    for step in range(4):
        batches = []
        for rank in ranks:
            ids = torch.arange(2 * lengths[rank][step % 2]).reshape(2, -1).remainder(11)
            batches.append({"ids": ids, "labels": torch.full_like(ids, -100) if rank == masked_rank else ids})
        assert engine.update(batches).applied
    return state(model)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("masked", [None, 0, 1])
def test_problem_4_ranks_whose_shapes_differ_or_whose_labels_are_all_masked_train_alike(
    both: Both, precision: str, masked: int | None
) -> None:
    """The guide's fourth problem: some ranks' gradients are zero under DDP and mixed precision."""
    lengths = [[3, 9], [7, 2]]
    first, second = both(train_texts, precision, lengths, masked)
    assert_bitwise(first, second)
    rounding = 2e-6 if precision == "fp32" else 1e-2
    assert_near(first, train_texts(precision, lengths, masked), rtol=rounding, atol=rounding)
    assert not first["/model/0.weight"].equal(nn.Embedding(11, 6).weight)


def threads() -> int:
    """Threads of this process, as the system counts them (Linux) and as Python does, once those that were told to end have."""
    for thread in threading.enumerate():
        if thread.name == "halfstep whereabouts":
            thread.join(5.0)
    return len(list(Path("/proc/self/task").glob("*"))) + threading.active_count()


def test_an_engine_that_is_gone_leaves_no_thread_behind(both: Both) -> None:
    """Many engines in one process would otherwise keep it busy with the threads of all those before."""
    job = Job(windows=[[[[0, 1]], [[2, 3]]]], weights=[1.0] * 4)
    both(train, job)
    before = both(threads)
    for _ in range(3):
        both(train, job)
    assert both(threads) == before
