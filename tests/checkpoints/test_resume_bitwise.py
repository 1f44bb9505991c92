"""A run that goes on from a checkpoint is the run that never stopped, to the last bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from checkpoints.runs import UPDATES, Net, Run, assert_same
from halfstep import Checkpoints
from halfstep.errors import ConfigError


def assert_resumes(folder: Path, *stops: int, **given: Any) -> None:
    whole = Run(**given).finish()
    for stop in stops:
        run = Run(**given)
        with Checkpoints(folder) as checkpoints:
            checkpoints.load(run.engine)
            run.until(stop, checkpoints)
    last = Run(**given, seed=99)
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.load(last.engine)
        assert restored is not None
        assert (restored.update, restored.ranks, restored.extra) == (stops[-1], 1, {"note": (stops[-1], [math.inf])})
    assert_same(last.finish().everything(), whole.everything())
    assert len(whole.engine.ledger) == UPDATES


@pytest.mark.parametrize("stop", [1, 2, 5, 8])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_in_every_precision_in_the_midst_of_an_epoch_and_at_its_end(precision: str, stop: int, tmp_path: Path) -> None:
    assert_resumes(tmp_path, stop, precision=precision)


def test_the_fp16_runs_do_overflow_and_do_move() -> None:
    ledger = Run("fp16").finish().engine.ledger
    assert ledger.applied > 0
    assert ledger.causes().get("overflow", 0) > 0


@pytest.mark.parametrize("optimizer", ["SGD", "Adafactor", "Adam, learning rate a tensor", "two"])
def test_with_every_kind_of_optimizer(optimizer: str, tmp_path: Path) -> None:
    assert_resumes(tmp_path, 4, optimizer=optimizer)


@pytest.mark.parametrize("scheduler", ["several", "steps"])
def test_with_every_kind_of_scheduler(scheduler: str, tmp_path: Path) -> None:
    assert_resumes(tmp_path, 4, scheduler=scheduler)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_after_two_resumes_in_a_row(precision: str, tmp_path: Path) -> None:
    assert_resumes(tmp_path, 2, 5, precision=precision)


def test_with_workers_after_two_resumes_in_a_row(tmp_path: Path) -> None:
    assert_resumes(tmp_path, 2, 5, workers=2)


def test_with_weights_in_bf16(tmp_path: Path) -> None:
    assert_resumes(tmp_path, 3, precision="bf16-pure", net=lambda: Net().bfloat16())


def test_a_plateau_and_a_frozen_weight(tmp_path: Path) -> None:
    def frozen() -> Net:
        net = Net()
        net.first.weight.requires_grad_(False)
        return net

    first = Run(net=frozen, scheduler="steps")
    first.engine.update([torch.randn(3, 4)])
    first.engine.plateau(3.0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(first.engine)
    second = Run(net=frozen, scheduler="steps", seed=5)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.load(second.engine)
    assert_same(second.everything(), first.everything())
    assert [s.best for s in second.schedulers if isinstance(s, ReduceLROnPlateau)] == [3.0]


def test_auto_is_decided_by_the_checkpoint(tmp_path: Path) -> None:
    first, second = Run("bf16"), Run("auto")
    with Checkpoints(tmp_path) as checkpoints:
        first.until(1, checkpoints)
        checkpoints.load(second.engine)
    assert str(second.engine.choices["precision"]) == "bf16 (kept on resume; then: asked for)"


def test_another_precision_that_was_asked_for_is_refused(tmp_path: Path) -> None:
    first, second = Run("bf16"), Run("fp32")
    with Checkpoints(tmp_path) as checkpoints:
        first.until(1, checkpoints)
        with pytest.raises(ConfigError) as told:
            checkpoints.load(second.engine)
    assert str(told.value) == (
        '`precision = "fp32"` was asked for, and the checkpoint was trained in "bf16": a resumed run keeps its precision. '
        'Ask for "bf16" or "auto".'
    )
