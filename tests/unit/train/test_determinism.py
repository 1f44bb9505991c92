"""Random numbers by seed and rank, and operations that repeat."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from halfstep.errors import RunStopped
from halfstep.train.determinism import repeatable, seed_ranks_apart


def draws(seed: int, rank: int) -> tuple[float, float, float]:
    seed_ranks_apart(seed, rank)
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_a_seed_gives_the_same_draws_and_each_rank_its_own() -> None:
    assert draws(3, 0) == draws(3, 0)
    assert all(mine != other for mine, other in zip(draws(3, 0), draws(3, 1), strict=True))


def test_an_operation_that_does_not_repeat_stops_the_run_with_its_name() -> None:
    def put() -> None:
        with repeatable(True):
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))

    with pytest.raises(RunStopped) as caught:
        put()
    assert str(caught.value) == (
        "`run.deterministic = true`, and the model uses put_, which on this device has no form that repeats bitwise. "
        "Use false, or another operation."
    )
    assert not torch.are_deterministic_algorithms_enabled()


def test_other_errors_pass_and_what_was_set_before_comes_back() -> None:
    def fail() -> None:
        with repeatable(True):
            assert torch.are_deterministic_algorithms_enabled()
            raise RuntimeError("another fault")

    with pytest.raises(RuntimeError, match=r"^another fault$"):
        fail()
    assert not torch.are_deterministic_algorithms_enabled()


def test_unasked_nothing_is_set() -> None:
    with repeatable(False):
        assert not torch.are_deterministic_algorithms_enabled()
