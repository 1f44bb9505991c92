"""A loader goes on after a resume in the midst of an epoch as it would have gone on: order, workers, augmentation, tails."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from halfstep import Engine
from halfstep.errors import DataError
from parity.by_hand import assert_bitwise, state

NUM_SAMPLES = 11


class Augmented(Dataset[Tensor]):
    """Samples that every generator has a hand in."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        drawn = torch.rand(()).item() + random.random() + float(np.random.rand())
        return torch.tensor([index, drawn])


def seed_worker(number: int) -> None:
    seed = torch.initial_seed() % 2**32
    random.seed(seed)
    np.random.seed(seed)


def loader_of(**given: Any) -> DataLoader[Tensor]:
    return DataLoader(Augmented(), batch_size=1, worker_init_fn=seed_worker, **given)


def shuffled(**given: Any) -> DataLoader[Tensor]:
    return loader_of(shuffle=True, **given)


def with_generator(**given: Any) -> DataLoader[Tensor]:
    return loader_of(shuffle=True, generator=torch.Generator().manual_seed(3), **given)


class Told:
    """A loader that can leave micro-batches out."""

    def __init__(self) -> None:
        self.epoch, self.left_out = 0, 0
        self.read: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def skip(self, micro_batches: int) -> None:
        self.left_out = micro_batches

    def __iter__(self) -> Iterator[Tensor]:
        begin, self.left_out = self.left_out, 0
        for index in range(begin, NUM_SAMPLES):
            self.read.append(index)
            yield torch.tensor([[index, float(self.epoch)]])


def list_of_batches() -> list[Tensor]:
    return [torch.tensor([[i, 0.5]]) for i in range(NUM_SAMPLES)]


class Run:
    """A training that keeps which samples it saw."""

    def __init__(self, loader: Iterable[Tensor], **given: Any) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.loader, self.seen = loader, []
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.engine = Engine(self.model, self.optimizer, loss=self.loss, precision="fp32", **{"accumulate": 3, **given})

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.seen.append((batch.tolist(), random.random()))
        noise = torch.rand(())
        return (model(batch) - noise).square().mean()

    def until(self, updates: int) -> str:
        """So many updates, and the state after them as JSON."""
        for update in self.engine.updates(self.loader, epochs=3):
            if update.index == updates:
                return self.saved()
        raise AssertionError(f"only {update.index} updates")

    def saved(self) -> str:
        return json.dumps([self.engine.state_dict(), {k: v.tolist() for k, v in self.model.state_dict().items()}])

    def resume(self, saved: str) -> None:
        engine, model = json.loads(saved)
        self.model.load_state_dict({k: torch.tensor(v) for k, v in model.items()})
        self.engine.load_state_dict(engine)

    def finish(self) -> None:
        for _ in self.engine.updates(self.loader, epochs=3):
            pass


LOADERS: dict[str, Callable[[], Iterable[Tensor]]] = {
    "in order": loader_of,
    "shuffled": shuffled,
    "shuffled by a generator of its own": with_generator,
    "a list": list_of_batches,
    "told to skip": Told,
}


def assert_resumes(make: Callable[[], Iterable[Tensor]], stops: list[int], **given: Any) -> None:
    whole = Run(make(), **given)
    whole.finish()
    resumed, seen = Run(make(), **given), 0
    for stop in stops:
        kept = resumed.until(stop)
        seen += len(resumed.seen)
        resumed = Run(make(), **given)
        torch.rand(7)  # whatever a script does before it resumes
        resumed.resume(kept)
    resumed.finish()
    assert resumed.seen == whole.seen[seen:]
    assert_bitwise(state(resumed.model), state(whole.model))
    assert resumed.engine.counters == whole.engine.counters
    assert resumed.engine.state_dict()["randomness"] == whole.engine.state_dict()["randomness"]


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("stop", [1, 3, 4, 5, 8, 12])
def test_a_run_goes_on_with_the_samples_that_it_would_have_seen(name: str, stop: int) -> None:
    assert_resumes(LOADERS[name], [stop])


@pytest.mark.parametrize("tail", ["carry", "drop"])
@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_whatever_becomes_of_the_tail(tail: str, stop: int) -> None:
    assert_resumes(with_generator, [stop], tail=tail)


@pytest.mark.parametrize("stops", [[2, 3], [4, 8], [3, 5, 6]])
def test_after_several_resumes_in_a_row(stops: list[int]) -> None:
    assert_resumes(shuffled, stops)


def test_workers_that_draw_numbers_of_their_own() -> None:
    assert_resumes(lambda: with_generator(num_workers=2), [2, 5])


def test_a_loader_that_can_skip_reads_nothing_again() -> None:
    first, second = Run(Told()), Run(Told())
    second.resume(first.until(2))
    second.until(3)
    assert isinstance(second.loader, Told)
    assert second.loader.read[0] == 6


def test_a_checkpoint_between_two_calls_begins_a_new_call() -> None:
    first, second = Run(list_of_batches()), Run(list_of_batches())
    first.finish()
    second.resume(first.saved())
    assert len(list(second.engine.updates(second.loader, epochs=1))) == 4


def test_a_state_that_is_saved_before_the_run_goes_on_is_the_same() -> None:
    first, second = Run(with_generator()), Run(with_generator())
    kept = first.until(2)
    second.resume(kept)
    assert second.saved() == kept.replace('"asked for"', '"kept on resume; then: asked for"')


def test_another_split_of_the_same_windows_sees_the_same_samples() -> None:
    first, second = Run(list_of_batches()), Run([torch.cat(list_of_batches()[i : i + 3]) for i in range(0, 11, 3)], accumulate=1)
    second.resume(first.until(2))
    second.until(3)
    assert [index for index, _ in second.seen[0][0]] == [6.0, 7.0, 8.0]


def refusal(loader: Iterable[Tensor], **given: Any) -> str:
    """What is said to one rank that goes on where two have stopped, each with a part of the windows."""
    first, second = Run(loader), Run(loader, **given)
    engine, model = json.loads(first.until(2))
    engine["position"]["ranks"] = 2
    second.resume(json.dumps([engine, model]))
    with pytest.raises(DataError) as told:
        second.finish()
    return str(told.value)


def test_another_number_of_ranks_needs_an_order_that_it_can_repeat() -> None:
    assert refusal(shuffled()) == (
        "The checkpoint was made by 2 ranks and the run has 1: the loader draws its order by itself, so that the same samples "
        "would not come again. Give it a sampler or batch sampler whose order is a function of the epoch (`set_epoch`)."
    )


def test_another_number_of_ranks_cannot_carry_tails() -> None:
    assert refusal(list_of_batches(), tail="carry") == (
        'With `tail = "carry"` windows lie across epochs, so that another number of ranks, or of micro-batches in a window, '
        "would not see the same samples. Go on with those of the checkpoint."
    )
