"""The loss scale against `torch.amp.GradScaler`'s arithmetic, and where it differs: a floor, and windows without weight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.amp import GradScaler

from halfstep.precision.scaler import LossScaler, ScalerSettings

CPU = torch.device("cpu")


def scaler_of(**given: float) -> LossScaler:
    return LossScaler(ScalerSettings(**given), CPU)  # type: ignore[arg-type]


def test_it_starts_and_moves_as_grad_scaler_does_by_default() -> None:
    ours, theirs = ScalerSettings(), GradScaler("cpu")
    assert ours.init_scale == theirs.get_scale() == 2.0**16
    assert ours.growth_factor == theirs.get_growth_factor() == 2.0
    assert ours.backoff_factor == theirs.get_backoff_factor() == 0.5
    assert ours.growth_interval == theirs.get_growth_interval() == 2000
    assert ours.floor == 2.0**-14


@settings(max_examples=30)
@given(
    skips=st.lists(st.booleans(), max_size=20),
    interval=st.integers(1, 5),
    growth=st.sampled_from([2.0, 4.0]),
    backoff=st.sampled_from([0.5, 0.25]),
    on_device=st.booleans(),
)
def test_its_history_is_that_of_grad_scaler(
    skips: list[bool], interval: int, growth: float, backoff: float, on_device: bool
) -> None:
    given = {"init_scale": 2.0**4, "growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    ours, theirs = scaler_of(**given, floor=2.0**-120), GradScaler("cpu", **given)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    for skipped in skips:
        theirs.scale(torch.ones(1))
        optimizer.param_groups[0]["params"][0].grad = torch.tensor([float("inf") if skipped else 1.0])
        theirs.step(optimizer)
        theirs.update()
        ours.update(torch.tensor(float(skipped)) if on_device else skipped)
        assert ours.scale.item() == theirs.get_scale()
    assert ours.state_dict() == {"scale": theirs.get_scale(), "growth": theirs._get_growth_tracker()}


def test_it_halves_on_every_overflow_and_not_on_the_second() -> None:
    """ "Two in a row" is another library's."""
    scaler = scaler_of()
    scaler.update(True)
    assert scaler.scale.item() == 2.0**15


def test_it_doubles_after_so_many_applied_updates_in_a_row() -> None:
    scaler = scaler_of(growth_interval=3)
    scales = []
    for skipped in (False, False, True, False, False, False, False):
        scaler.update(skipped)
        scales.append(scaler.scale.item() / 2.0**16)
    assert scales == [1, 1, 0.5, 0.5, 0.5, 1, 1]


@pytest.mark.parametrize("skipped", [True, False])
@pytest.mark.parametrize("flag", [bool, lambda s: torch.tensor(float(s))], ids=["host", "device"])
def test_a_window_without_weight_moves_neither_scale_nor_count(skipped: bool, flag: type) -> None:
    scaler = scaler_of(growth_interval=2)
    scaler.update(False)
    before = scaler.state_dict()
    scaler.update(flag(skipped), torch.tensor(0.0))
    assert scaler.state_dict() == before
    scaler.update(flag(False), torch.tensor(4.0))
    assert scaler.state_dict() == {"scale": 2.0**17, "growth": 0}


def test_below_the_floor_is_strictly_below() -> None:
    scaler = scaler_of(init_scale=4.0, floor=1.0)
    below = []
    for _ in range(3):
        scaler.update(True)
        below.append(scaler.below_floor)
    assert below == [False, False, True]


def test_an_update_keeps_the_scale_that_it_ran_under() -> None:
    scaler = scaler_of()
    ran_under = scaler.scale
    scaler.update(True)
    assert ran_under.item() == 2.0**16


def test_a_saved_scale_is_taken_up() -> None:
    first, second = scaler_of(growth_interval=5), scaler_of(growth_interval=5)
    for skipped in (True, False, False):
        first.update(skipped)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict() == {"scale": 2.0**15, "growth": 2}
