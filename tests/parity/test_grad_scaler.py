"""FP16 against the loop with `torch.amp.GradScaler`: parameters, optimizer states and scales, to the last bit.

Every factor is a power of two, which FP16 too multiplies exactly where nothing falls below its smallest number; a mean over
four micro-batches is backward's loss here and a quarter of it by hand, so that the scale by hand starts four times as high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.amp import GradScaler
from torch.optim import AdamW

from halfstep import Engine
from halfstep.engine import Cause
from halfstep.precision.scaler import ScalerSettings
from parity.by_hand import (
    FUSED,
    UNFUSED,
    Batch,
    ByHand,
    MakeOptimizer,
    as_if_on_a_device,
    assert_bitwise,
    assert_near,
    in_windows,
    mean_loss,
    micro_batches,
    state,
    tiny_model,
    weighted_loss,
)

TINY_FLOOR = 2.0**-100
LOW = ScalerSettings(init_scale=2.0**10)
OVERFLOWS = 1e38
"""Finite in FP32, so that the loss is finite; times the loss scale it is not."""

Factors = st.lists(st.sampled_from([1.0] * 6 + [0.5, OVERFLOWS, math.inf, math.nan]), min_size=1, max_size=12)
fused_or_not = pytest.mark.parametrize("make", [UNFUSED["AdamW"], FUSED["AdamW fused"]], ids=["unfused", "fused"])


def settings_of(scaler: GradScaler, *, divided_by: float = 1.0) -> ScalerSettings:
    """The same scaler for the engine."""
    return ScalerSettings(
        init_scale=scaler.get_scale() / divided_by,
        growth_factor=scaler.get_growth_factor(),
        growth_interval=scaler.get_growth_interval(),
        backoff_factor=scaler.get_backoff_factor(),
        floor=TINY_FLOOR,
    )


def assert_same_training(
    make: MakeOptimizer, batches: Sequence[Batch], scaler: GradScaler, *, accumulate: int = 1, on_host: bool = True
) -> None:
    """Train both ways; all that an update may change must be the same after each."""
    ours, theirs = tiny_model(), tiny_model()
    optimizer, plain = make(ours.parameters()), make(theirs.parameters())
    settings = settings_of(scaler, divided_by=accumulate)
    engine = Engine(ours, optimizer, loss=mean_loss, precision="fp16", accumulate=accumulate, scaler=settings)
    engine = engine if on_host else as_if_on_a_device(engine)
    loop = ByHand(model=theirs, optimizers=[plain], dtype=torch.float16, scaler=scaler, mean=True)
    for update, window in zip(engine.updates(batches), in_windows(batches, accumulate), strict=True):
        assert update.scale * accumulate == scaler.get_scale()
        assert update.applied == loop.update(window)
        assert_bitwise(state(ours), state(theirs))
        if engine.ledger.applied:  # before, GradScaler has fused optimizers make their states, of zeros
            assert_bitwise(state(ours, optimizer), state(theirs, plain))


def overflowing(factors: Sequence[float]) -> list[Batch]:
    return [batch.times(factor) for batch, factor in zip(micro_batches(len(factors)), factors, strict=True)]


@settings(max_examples=15)
@given(factors=Factors, fused=st.booleans(), on_host=st.booleans())
def test_overflows_at_random_micro_batches_are_bitwise_grad_scalers(factors: list[float], fused: bool, on_host: bool) -> None:
    make = FUSED["AdamW fused"] if fused else UNFUSED["AdamW"]
    scaler = GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
    assert_same_training(make, overflowing(factors), scaler, on_host=on_host)


@settings(max_examples=15)
@given(factors=Factors.filter(lambda some: len(some) % 4 == 0))
def test_overflows_inside_windows_of_four_are_bitwise_grad_scalers(factors: list[float]) -> None:
    scaler = GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    assert_same_training(UNFUSED["SGD"], overflowing(factors), scaler, accumulate=4)


@pytest.mark.parametrize("make", [*UNFUSED.values(), *FUSED.values()], ids=[*UNFUSED, *FUSED])
def test_sixty_updates_with_overflow_and_growth_are_bitwise_grad_scalers(make: MakeOptimizer) -> None:
    """Every optimizer; the first update is good, since fused SGD makes its momentum of garbage in a first step that it skips."""
    factors = [OVERFLOWS if number in (9, 10, 33) else 1.0 for number in range(60)]
    assert_same_training(make, overflowing(factors), GradScaler("cpu", init_scale=2.0**8, growth_interval=7))


def test_a_loss_whose_gradients_overflow_calibrates_the_scale_as_grad_scaler_does() -> None:
    batches = [batch.times(1000.0) for batch in micro_batches(12)]
    model = tiny_model()
    engine = Engine(model, AdamW(model.parameters()), loss=mean_loss, precision="fp16")
    causes = [update.cause for update in engine.updates(batches)]
    calibrating = causes.index(None)
    assert calibrating > 0
    assert set(causes[:calibrating]) == {Cause.CALIBRATION}
    assert_same_training(UNFUSED["AdamW"], batches, GradScaler("cpu"))


@fused_or_not
def test_clipping_comes_after_unscaling(make: MakeOptimizer) -> None:
    """The coefficient is computed in FP32 there and in FP64 here: equal to FP32's rounding over eight updates."""
    ours, theirs = tiny_model(), tiny_model()
    optimizer, plain = make(ours.parameters()), make(theirs.parameters())
    scaler = GradScaler("cpu", init_scale=2.0**10)
    engine = Engine(ours, optimizer, loss=mean_loss, precision="fp16", clip_norm=0.05, scaler=settings_of(scaler))
    loop = ByHand(model=theirs, optimizers=[plain], dtype=torch.float16, scaler=scaler, clip_norm=0.05, mean=True)
    for update, batch in zip(engine.updates(micro_batches(8)), micro_batches(8), strict=True):
        loop.update([batch])
        assert update.grad_norm > 0.05
    assert_near(state(ours, optimizer), state(theirs, plain), rtol=1e-5, atol=1e-5)


def test_the_norm_reported_in_fp16_is_that_of_the_unscaled_gradient() -> None:
    """Equal to FP32's within FP16's rounding of forward and backward."""
    window = micro_batches(4)
    assert _norm("fp16", window) == pytest.approx(_norm("fp32", window), rel=2**-9)


def _norm(precision: str, window: Sequence[Batch]) -> float:
    model = tiny_model()
    engine = Engine(model, AdamW(model.parameters()), loss=weighted_loss, precision=precision, scaler=LOW)
    return engine.update(window).grad_norm


def test_ragged_tokens_in_fp16_are_the_token_weighted_mean() -> None:
    """The loop by hand divides by the count before backward; the two differ by FP16's rounding of backward."""
    batches = [
        Batch(x=b.x, y=b.y, weight=torch.tensor(w))
        for b, w in zip(micro_batches(3), ([1.0, 3.0], [0.0, 0.0], [2.0, 1.0]), strict=True)
    ]
    ours, theirs = tiny_model(), tiny_model()
    optimizer, plain = UNFUSED["SGD"](ours.parameters()), UNFUSED["SGD"](theirs.parameters())
    Engine(ours, optimizer, loss=weighted_loss, precision="fp16", accumulate=3, scaler=LOW).update(batches)
    ByHand(model=theirs, optimizers=[plain], dtype=torch.float16, scaler=GradScaler("cpu", init_scale=2.0**10)).update(batches)
    assert_near(state(ours, optimizer), state(theirs, plain), rtol=2**-9, atol=2**-12)
