"""A skipped update changes nothing but the ledger and the loss scale, and says why it was skipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from halfstep import Engine
from halfstep.engine import Cause, Update
from halfstep.precision.scaler import ScalerSettings
from parity.by_hand import (
    FUSED,
    OPTIMIZERS,
    UNFUSED,
    Batch,
    MakeOptimizer,
    as_if_on_a_device,
    assert_bitwise,
    mean_loss,
    micro_batches,
    state,
    tiny_model,
    weighted_loss,
)

LOW = ScalerSettings(init_scale=2.0**10)
PRECISIONS = ["fp32", "bf16", "fp16"]
on_both_paths = pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
in_each_precision = pytest.mark.parametrize("precision", PRECISIONS)


Loss = Callable[..., Any]


class Run:
    """An engine with everything that follows an update attached to it."""

    def __init__(self, make: MakeOptimizer, *, on_host: bool = True, loss: Loss = weighted_loss, **given: Any) -> None:
        self.model = tiny_model()
        self.optimizer = make(self.model.parameters())
        self.scheduler = StepLR(self.optimizer, step_size=1, gamma=0.5)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.engine = Engine(self.model, self.optimizer, loss=loss, scheduler=self.scheduler, ema=self.ema, scaler=LOW, **given)
        if not on_host:
            as_if_on_a_device(self.engine)

    def update(self, *batches: Batch) -> Update:
        update = self.engine.update(batches)
        self.engine.settle()
        return update

    def everything(self) -> dict[str, Any]:
        rates = {"rates": self.scheduler.state_dict()["_step_count"], "rate": self.scheduler.get_last_lr()}
        weight = {"weight": self.engine.counters.weight, "applied": self.engine.ledger.applied}
        return {**state(self.model, self.optimizer), **{f"ema{k}": v for k, v in state(self.ema).items()}, **rates, **weight}


@on_both_paths
@in_each_precision
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_skipped_update_leaves_everything_bitwise_equal(make: MakeOptimizer, precision: str, on_host: bool) -> None:
    run = Run(make, precision=precision, on_host=on_host)
    good, bad, other, more = micro_batches(4)
    run.update(good)
    before = run.everything()
    assert not run.update(other, bad.times(math.inf)).applied
    assert_bitwise(before, run.everything())
    assert run.update(more).applied


@settings(max_examples=20)
@given(
    factors=st.lists(st.sampled_from([1.0, 1.0, math.inf, math.nan, 3e38]), min_size=1, max_size=6),
    precision=st.sampled_from(PRECISIONS),
    fused=st.booleans(),
)
def test_a_run_with_bad_updates_is_bitwise_the_run_without_them(factors: list[float], precision: str, fused: bool) -> None:
    """In FP16 too: another scale is another power of two."""
    batches = micro_batches(len(factors))
    make = FUSED["AdamW fused"] if fused else UNFUSED["AdamW"]
    with_bad, without = Run(make, precision=precision), Run(make, precision=precision)
    for batch, factor in zip(batches, factors, strict=True):
        if with_bad.update(batch.times(factor)).applied:
            assert without.update(batch).applied
    assert_bitwise(with_bad.everything(), without.everything())
    assert with_bad.engine.ledger.applied == factors.count(1.0)


def causes(run: Run, *batches: Batch) -> tuple[Cause | None, str | None]:
    update = run.update(*batches)
    return update.cause, update.skipped_because


@on_both_paths
def test_the_first_overflows_of_fp16_are_calibration_and_later_ones_overflow(on_host: bool) -> None:
    run = Run(UNFUSED["AdamW"], precision="fp16", on_host=on_host, loss=mean_loss)
    good, bad = micro_batches(2)
    assert causes(run, bad.times(1e38)) == (Cause.CALIBRATION, "calibration")
    assert causes(run, good) == (None, None)
    assert causes(run, bad.times(1e38)) == (Cause.OVERFLOW, "overflow")


class Exploding(torch.autograd.Function):
    """The identity, with a gradient that is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * math.inf


def exploding_loss(model: nn.Module, batch: Batch) -> Tensor:
    return Exploding.apply(mean_loss(model, batch))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_that_are_not_finite_though_the_loss_is_are_an_overflow(precision: str) -> None:
    run = Run(UNFUSED["AdamW"], precision=precision, loss=exploding_loss)
    assert causes(run, *micro_batches(1)) == (Cause.OVERFLOW, "overflow")


@on_both_paths
@in_each_precision
def test_a_nan_in_the_data_names_the_sample(precision: str, on_host: bool) -> None:
    first, second = micro_batches(2, size=3)
    second.x[1, 2] = math.nan
    found = causes(Run(UNFUSED["AdamW"], precision=precision, on_host=on_host), first, second)
    assert found == (Cause.DATA, "data not finite: batch.x, sample 1 of micro-batch 2")


@in_each_precision
def test_a_weight_that_is_not_finite_is_named(precision: str) -> None:
    run = Run(UNFUSED["AdamW"], precision=precision)
    with torch.no_grad():
        run.model[3].weight[1, 2] = math.inf
    assert causes(run, *micro_batches(1)) == (Cause.WEIGHTS, "weights not finite: `3.weight`")


@on_both_paths
@in_each_precision
def test_a_loss_that_is_not_finite_is_said(precision: str, on_host: bool) -> None:
    run = Run(UNFUSED["AdamW"], precision=precision, on_host=on_host)
    good, bad = micro_batches(2)
    assert causes(run, good, bad.times(-math.inf)) == (Cause.LOSS, "loss not finite: the loss is -inf")


@on_both_paths
@in_each_precision
def test_a_window_whose_labels_are_all_masked_has_no_weight(precision: str, on_host: bool) -> None:
    run = Run(UNFUSED["AdamW"], precision=precision, on_host=on_host)
    masked = micro_batches(2, weights=[0.0] * 4)
    assert causes(run, *masked) == (Cause.NO_WEIGHT, "no weight: every label of the window is masked")
    if precision == "fp16":
        assert run.engine.state_dict()["scaler"] == {"scale": 2.0**10, "growth": 0}, "there was no overflow"


def test_a_window_that_is_masked_in_part_is_updated() -> None:
    run = Run(UNFUSED["AdamW"], precision="fp32")
    update = run.update(*micro_batches(3, weights=[0.0, 0.0, 1.0, 0.0, 0.0, 0.0]))
    assert (update.applied, update.weight) == (True, 1.0)


def test_the_data_is_blamed_before_the_loss_that_it_spoils() -> None:
    run = Run(UNFUSED["AdamW"], precision="fp32")
    (bad,) = micro_batches(1)
    bad.y[0, 0] = math.inf
    update = run.update(bad)
    assert math.isinf(update.loss) or math.isnan(update.loss)
    assert update.cause is Cause.DATA


def test_the_loss_of_a_skipped_update_is_shown_as_it_is() -> None:
    """Peers replace a NaN in the loss that they log."""
    run = Run(UNFUSED["AdamW"], precision="fp32")
    good, bad = micro_batches(2)
    assert math.isnan(run.update(good, bad.times(math.nan)).loss)


def test_skips_are_counted_by_cause_and_kept_with_their_numbers() -> None:
    run = Run(UNFUSED["AdamW"], precision="fp32")
    good, bad = micro_batches(2)
    masked = micro_batches(1, weights=[0.0, 0.0])[0]
    for batch in (good, bad.times(math.inf), masked, bad.times(math.inf), good):
        run.update(batch)
    ledger = run.engine.ledger
    assert ledger.causes() == {"loss not finite": 2, "no weight": 1}
    assert [skip.index for skip in ledger.skips] == [2, 3, 4]
    assert (ledger.applied, ledger.skipped_in_a_row, len(ledger)) == (2, 0, 5)
    assert [entry.applied for entry in ledger] == [True, False, False, False, True]


def test_counters_tell_computed_from_learnt() -> None:
    run = Run(UNFUSED["AdamW"], precision="fp32")
    good, bad = micro_batches(2, size=3)
    run.update(good, good)
    run.update(bad.times(math.inf))
    counters = run.engine.counters
    assert (counters.weight, counters.micro_batches, counters.samples) == (6.0, 3, 9)


@on_both_paths
@pytest.mark.parametrize("fused", [True, False])
def test_an_overflow_in_one_optimizers_part_skips_all_of_them(fused: bool, on_host: bool) -> None:
    """By hand, a scaler steps the others: half an update."""
    model = tiny_model()
    head = AdamW(model[3].parameters(), lr=0.01, fused=fused)
    body = AdamW([*model[0].parameters(), *model[1].parameters()], lr=0.01, fused=fused)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return mean_loss(model, batch) + Exploding.apply(model[3].bias).sum() * (batch.factor - 1.0)

    engine = Engine(model, [head, body], loss=loss, precision="fp32")
    engine = engine if on_host else as_if_on_a_device(engine)
    (bad,) = micro_batches(1)
    before = state(model)
    assert engine.update([bad.times(2.0)]).cause is Cause.OVERFLOW
    assert_bitwise(before, state(model))
