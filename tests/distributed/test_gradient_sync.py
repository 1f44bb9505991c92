"""Gradients are reduced once a window, whichever way, and the caller's own windows and wrappers are as good as the engine's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from distributed.conftest import Both
from distributed.jobs import Deal, Job, assert_equals_one_process, batch_of, mine, trained
from halfstep import Engine
from halfstep.errors import ModelError
from parity.by_hand import Batch, assert_bitwise, assert_near, cut, samples, state, tiny_model, weighted_loss

RAGGED = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0, 5.0, 8.0]
DEAL: Deal = [[[0, 1], [2], [3]], [[4], [5, 6]]]
ALONE: Deal = [[], [[8, 9], [10, 11]]]
FP32_ROUNDING = 2e-6
DURING = "during the last backward (once a window, overlapped with backward by DDP)"


def counting(buckets, bucket):  # DDP looks at the annotations of a hook, and wants none or the very classes
    """A communication hook of DDP that notes each bucket, and averages it as DDP does."""
    buckets.append(bucket.index())
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def buckets_by_window(windows: Sequence[Deal]) -> list[int]:
    buckets: list[int] = []
    job, counts = Job(windows=windows, weights=RAGGED), []

    def run(engine: Engine) -> list[Any]:
        assert isinstance(engine.model, DistributedDataParallel)
        engine.model.register_comm_hook(buckets, counting)
        updates = []
        for deal in windows:
            before = len(buckets)
            updates.append(engine.update([batch_of(job, each) for each in mine(deal)]))
            counts.append(len(buckets) - before)
        return updates

    trained(job, run)
    return counts


def test_ddp_reduces_once_a_window_and_not_where_a_rank_has_no_data(both: Both) -> None:
    for counts in both(buckets_by_window, [DEAL, DEAL, DEAL, DEAL, ALONE, DEAL]):
        assert counts == [0, 0, 1, 1, 0, 1], "the model is one bucket; in the first two windows ranks look for a size that fits"


def collectives(windows: Sequence[Deal], given: dict[str, Any]) -> list[Counter[str]]:
    """The collectives of each window, as the profiler names them."""
    job, counts = Job(windows=windows, weights=RAGGED, given=given), []

    def run(engine: Engine) -> list[Any]:
        updates = []
        for deal in windows:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                updates.append(engine.update([batch_of(job, each) for each in mine(deal)]))
            counts.append(Counter(event.name for event in profile.events() if event.name.startswith("gloo:")))
        return updates

    trained(job, run)
    return counts


@pytest.mark.parametrize(("given", "wanted"), [({}, 3), ({"find_unused_parameters": True}, 4)], ids=str)
def test_the_number_of_collectives_does_not_depend_on_the_number_of_micro_batches(
    both: Both, given: dict[str, Any], wanted: int
) -> None:
    """Who has data, loss and weight, gradients; and where parameters may be unused, which ones are."""
    long: Deal = [[[0], [1], [2], [3], [4]], [[5], [6], [7], [8]]]
    short: Deal = [[[0, 1]], [[5]]]
    for counts in both(collectives, [DEAL, DEAL, DEAL, long, short], given):
        assert [dict(count) for count in counts[-2:]] == [{"gloo:all_reduce": wanted}] * 2


def collectives_of_updates() -> list[Counter[str]]:
    """The collectives of each window that is read from a loader."""
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=weighted_loss, precision="fp32", accumulate=3)
    updates = engine.updates(cut(samples(16), [1] * 16)[dist.get_rank() :])
    counts = []
    while True:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            update = next(updates, None)
        counts.append(Counter(event.name for event in profile.events() if event.name.startswith("gloo:")))
        if update is None:
            return counts


def test_a_window_that_is_read_from_a_loader_takes_one_collective_beside_its_buckets(both: Both) -> None:
    """Whether anybody has more data goes with loss and weight; the model is one bucket."""
    for counts in both(collectives_of_updates):
        assert len(counts) == 7, "six updates, of which rank 1 has no data for the last, and the end"
        assert [dict(count) for count in counts[3:5]] == [{"gloo:all_reduce": 2}] * 2


class Watched(nn.Module):
    """Notes whether DDP would reduce, in each forward and in each backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.wrapper: list[DistributedDataParallel] = []
        self.seen: list[tuple[str, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self._note("forward")
        y: Tensor = self.inner(x)
        y.register_hook(lambda _: self._note("backward"))
        return y

    def _note(self, what: str) -> None:
        self.seen.extend((what, wrapper.require_backward_grad_sync) for wrapper in self.wrapper)


def synchronized(num_micro_batches: Sequence[int]) -> list[tuple[str, bool]]:
    model = Watched(tiny_model())
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=weighted_loss, precision="fp32", accumulate=4)
    assert isinstance(engine.model, DistributedDataParallel)
    model.wrapper.append(engine.model)
    for count in num_micro_batches:
        model.seen.clear()
        engine.update([samples(2)] * (count + dist.get_rank()))
    return list(model.seen)


def test_only_the_last_micro_batch_of_a_window_synchronizes_forward_and_backward(both: Both) -> None:
    for rank, seen in enumerate(both(synchronized, [1, 1, 3])):
        before = [("forward", False), ("backward", False)] * (2 + rank)
        assert seen == [*before, ("forward", True), ("backward", True)]


class Branches(nn.Module):
    """Of two branches a batch takes one; a third is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        taken: nn.Linear = self.left if x.shape[0] % 2 else self.right
        y: Tensor = taken(x)
        return y


BRANCHES: dict[str, Sequence[Deal]] = {
    "a branch on one rank only": [[[[0], [1]], [[2, 3], [4, 5]]]] * 4,
    "another branch in each micro-batch": [[[[0], [1, 2], [3]], [[4, 5], [6]]]] * 4,
    "a branch in one unsynchronized micro-batch only": [[[[0, 1], [2]], [[4], [5]]]] * 4,
    "one branch in some windows": [[[[0]], [[1]]], [[[2, 3]], [[4, 5]]], [[[0]], [[1, 2]]], [[[0, 1]], [[2, 3]]], [[[0]], [[1]]]],
    "a branch on one rank while the other has no data": [[[], [[0], [1, 2]]], [[], [[0]]], [[], [[0, 1]]], [[[2]], [[0, 1]]]],
}


def train_branches(windows: Sequence[Deal]) -> tuple[dict[str, Any], dict[str, Any], list[float], str]:
    torch.manual_seed(0)
    model = Branches()
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    before = state(model)
    engine = Engine(model, optimizer, loss=weighted_loss, precision="fp32", find_unused_parameters=True)
    job = Job(windows=windows, weights=RAGGED)
    losses = [engine.update([batch_of(job, each) for each in mine(deal)]).loss for deal in windows]
    return before, state(model, optimizer), losses, str(engine.choices["gradient_sync"])


@pytest.mark.parametrize("windows", BRANCHES.values(), ids=BRANCHES)
def test_parameters_used_on_one_rank_or_in_one_micro_batch_only(both: Both, windows: Sequence[Deal]) -> None:
    (before, first, losses, choice), (_, second, same, _) = both(train_branches, windows)
    assert choice == "after the last backward (parameters may be unused in some micro-batches)"
    assert_bitwise(first, second)
    assert losses == same
    _, one, one_losses, _ = train_branches(windows)
    assert losses == pytest.approx(one_losses, rel=1e-5)
    assert_near(first, one, rtol=1e-4, atol=1e-4)
    never = [name for name in before if "never" in name]
    assert all(first[name].equal(before[name]) for name in never), "unused everywhere: no gradient, and no weight decay"
    assert not any(first[name].equal(before[name]) for name in before if name not in never)


class Gan:
    """A generator and a discriminator, trained by turns in windows of the caller's own."""

    def __init__(self, **given: Any) -> None:
        torch.manual_seed(3)
        self.make, self.judge = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.maker = Engine(self.make, SGD(self.make.parameters(), lr=0.1), precision="fp32", clip_norm=0.5, **given)
        self.judger = Engine(self.judge, SGD(self.judge.parameters(), lr=0.1), precision="fp32", clip_norm=0.5, **given)

    def turn(self, batches: Sequence[Batch]) -> None:
        with self.judger.window() as window:
            for batch in batches:
                with window.forward():
                    fake = self.maker.model(batch.x).detach()
                    good, bad = self.judger.model(batch.x), self.judger.model(fake)
                window.backward(-good.sum(), weight=len(batch.x))
                window.backward(bad.sum(), weight=0)
        with self.maker.window() as window:
            for batch in batches:
                with window.forward():
                    score = self.judger.model(self.maker.model(batch.x))
                window.backward(-score.sum(), weight=len(batch.x), retain_graph=True)
                window.backward(score.square().sum(), weight=0)


def train_gan(windows: Sequence[Deal], given: dict[str, Any]) -> tuple[dict[str, Any], str]:
    gan, job = Gan(**given), Job(windows=windows, weights=RAGGED)
    for deal in windows:
        gan.turn([batch_of(job, each) for each in mine(deal)])
    return {**state(gan.make), **{f"judge {name}": value for name, value in state(gan.judge).items()}}, str(
        gan.maker.choices["gradient_sync"]
    )


@pytest.mark.parametrize("given", [{}, {"loss": weighted_loss}], ids=["without a loss", "with a loss, thus in DDP"])
def test_a_gan_of_two_engines_with_several_backwards_a_window(both: Both, given: dict[str, Any]) -> None:
    windows = [DEAL, ALONE, DEAL, DEAL]
    (first, choice), (second, _) = both(train_gan, windows, given)
    assert_bitwise(first, second)
    assert_near(first, train_gan(windows, given)[0], rtol=1e-5, atol=FP32_ROUNDING)
    own = "after the last backward (the caller runs the backwards, and any of them can be the last)"
    assert choice == (DURING if given else own)


def train_with_penalty(windows: Sequence[Deal]) -> dict[str, Any]:
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.01), precision="fp32", clip_norm=1.0)
    job = Job(windows=windows, weights=RAGGED)
    for deal in windows:
        with engine.window() as window:
            for batch in (batch_of(job, each) for each in mine(deal)):
                x = batch.x.clone().requires_grad_()
                with window.forward():
                    total, weight = weighted_loss(engine.model, Batch(x=x, y=batch.y, weight=batch.weight))
                window.backward(total + sum(g.square().sum() for g in window.grad(total, [x])), weight)
    return state(model)


def test_a_gradient_penalty_in_windows_of_the_callers_own(both: Both) -> None:
    windows = [DEAL, ALONE, DEAL]
    first, second = both(train_with_penalty, windows)
    assert_bitwise(first, second)
    assert_near(first, train_with_penalty(windows), rtol=1e-5, atol=FP32_ROUNDING)


def plain(model: nn.Module) -> nn.Module:
    return model


def in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def in_ddp_that_looks(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def compiled_in_ddp(model: nn.Module) -> nn.Module:
    return torch.compile(DistributedDataParallel(model), backend="eager")  # type: ignore[return-value]


def train_wrapped(wrap: Callable[[nn.Module], nn.Module], windows: Sequence[Deal]) -> tuple[dict[str, Any], str]:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # DDP and the engine give everybody rank 0's
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    wrapped = wrap(model)
    engine = Engine(wrapped, SGD(model.parameters(), lr=0.1), loss=weighted_loss, precision="fp32")
    assert engine.module is model
    job = Job(windows=windows, weights=RAGGED)
    for deal in windows:
        engine.update([batch_of(job, each) for each in mine(deal)])
    return state(model), str(engine.choices["gradient_sync"])


@pytest.mark.parametrize("wrap", [plain, in_ddp, in_ddp_that_looks, compiled, compiled_in_ddp])
def test_models_that_are_wrapped_or_compiled_already(both: Both, wrap: Callable[[nn.Module], nn.Module]) -> None:
    windows = [DEAL, DEAL, DEAL, ALONE, DEAL]
    (first, choice), (second, _) = both(train_wrapped, wrap, windows)
    assert_bitwise(first, second)
    assert_near(first, train_wrapped(plain, windows)[0], rtol=1e-5, atol=FP32_ROUNDING)
    looks = "after the last backward (the DDP wrapper that was given looks for unused parameters)"
    assert choice == (looks if wrap is in_ddp_that_looks else DURING)


def refusals() -> list[str]:
    """What is said of wrappers that cannot be used."""
    normal = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    wrappers = [
        DistributedDataParallel(normal),
        DistributedDataParallel(nn.Linear(4, 2), static_graph=True),
        DistributedDataParallel(nn.Linear(4, 2), process_group=alone),
    ]
    told = []
    for wrapper in wrappers:
        with pytest.raises(ModelError) as error:
            Engine(wrapper, SGD(wrapper.parameters(), lr=0.1), loss=weighted_loss, precision="fp32")
        told.append(str(error.value))
    return told


def test_ddp_wrappers_that_uneven_ranks_would_hang_in_are_refused_with_a_sentence(both: Both) -> None:
    first, second = both(refusals)
    assert first == second
    assert first == [
        "The DDP wrapper broadcasts buffers before each forward, and would wait for ever for a rank without data. Give the "
        "engine the model itself, which it wraps, or tell DDP not to (`broadcast_buffers=False`).",
        "The DDP wrapper has a static graph, with which a rank without data would hang the others. Give the engine the model "
        "itself, which it wraps.",
        "The DDP wrapper averages over 1 ranks, and the run has 2. Give the engine the model itself, which it wraps.",
    ]


def train_tied_and_frozen(windows: Sequence[Deal]) -> dict[str, Any]:
    """Shared weights, a frozen layer, channels last, and activations computed again in backward."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    blocks[2][0].weight = blocks[0][0].weight
    blocks[1].requires_grad_(False)
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(4, 2))
    engine = Engine(
        model,
        SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        loss=weighted_loss,
        precision="bf16",
        checkpoint_activations=True,
    )
    job = Job(windows=windows, weights=RAGGED)
    for deal in windows:
        engine.update([batch_of(job, each) for each in mine(deal)])
    return state(model)


def test_shared_and_frozen_parameters_with_activation_checkpointing(both: Both) -> None:
    windows = [DEAL, DEAL, DEAL, ALONE, DEAL]
    first, second = both(train_tied_and_frozen, windows)
    assert_bitwise(first, second)
    assert_near(first, train_tied_and_frozen(windows), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("given", [{}, {"find_unused_parameters": True}], ids=str)
def test_gradients_of_several_buckets(both: Both, given: dict[str, Any]) -> None:
    first, second = both(train_wide, given)
    assert_bitwise(first, second)
    assert_near(first, train_wide(given), rtol=1e-5, atol=FP32_ROUNDING)


def train_wide(given: dict[str, Any]) -> dict[str, Any]:
    """Layers of 16 MiB, of which a bucket holds one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 2))
    engine = Engine(model, SGD(model.parameters(), lr=0.01), loss=weighted_loss, precision="fp32", **given)
    job = Job(windows=[DEAL, ALONE, DEAL], weights=RAGGED)
    for deal in job.windows:
        engine.update([batch_of(job, each) for each in mine(deal)])
    return {name: value.flatten()[:1000] if isinstance(value, Tensor) else value for name, value in state(model).items()}


def test_the_reason_in_one_process_is_that_there_is_one() -> None:
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=weighted_loss, precision="fp32")
    assert str(engine.choices["gradient_sync"]) == "not at all (one process)"
    assert engine.model is model


def train_job(job: Job) -> Any:
    return trained(job, lambda engine: [engine.update([batch_of(job, each) for each in mine(deal)]) for deal in job.windows])


def test_windows_that_are_reduced_late_and_in_ddp_by_turns(both: Both) -> None:
    job = Job(windows=[DEAL, ALONE, DEAL, ALONE, DEAL, ALONE, DEAL], weights=RAGGED, given={"clip_norm": 0.1})
    assert_equals_one_process(job, both(train_job, job))
