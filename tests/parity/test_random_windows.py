"""Random windows in every precision against the loop by hand: sizes, weights, clipping, optimizers, updates that overflow.

Where every window weighs a power of two all factors are exact, and the two agree to the last bit. Elsewhere the loop by hand
divides before backward and the engine after it, so that they differ by the rounding of backward in that precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.amp import GradScaler
from torch.optim import SGD

from halfstep import Engine
from halfstep.precision.scaler import ScalerSettings
from parity.by_hand import (
    FUSED,
    UNFUSED,
    Batch,
    ByHand,
    MakeOptimizer,
    assert_bitwise,
    assert_near,
    cut,
    in_windows,
    samples,
    state,
    tiny_model,
    weighted_loss,
)

SCALE = 2.0**8
ROUNDING = {"fp32": 2e-6, "bf16": 2.0**-6, "fp16": 2.0**-8, "bf16-pure": 2.0**-5}
"""Of one update at learning rate 0.05: a few units in the last place of what backward computes in."""
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

POWERS_OF_TWO = [[1, 1, 1, 1, 1, 1, 1, 1], [4, 0, 0, 0, 1, 2, 1, 0], [0, 0, 1, 0, 0, 0, 0, 0], [2, 3, 5, 6, 0, 0, 0, 0]]
"""Weights of a window's samples: they add up to 8, 8, 1 and 16."""
Sizes = st.lists(st.integers(1, 4), min_size=1, max_size=8)


def sgd(held: Any) -> SGD:
    return SGD(held, lr=0.05)


def in_precision(batches: Sequence[Batch], precision: str) -> list[Batch]:
    """Pure BF16 takes its inputs in BF16: nothing casts them."""
    dtype = torch.bfloat16 if precision == "bf16-pure" else torch.float32
    return [Batch(x=b.x.to(dtype), y=b.y.to(dtype), weight=b.weight, factor=b.factor) for b in batches]


def trained(
    make: MakeOptimizer, batches: Sequence[Batch], precision: str, accumulate: int, **given: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What engine and loop make of the windows; where an update is skipped, both must skip it."""
    ours, theirs = tiny_model(), tiny_model()
    theirs = theirs.bfloat16() if precision == "bf16-pure" else theirs
    optimizer, plain = make(ours.parameters()), make(theirs.parameters())
    low = ScalerSettings(init_scale=SCALE)
    engine = Engine(ours, optimizer, loss=weighted_loss, precision=precision, accumulate=accumulate, scaler=low, **given)
    scaler = GradScaler("cpu", init_scale=SCALE) if precision == "fp16" else None
    loop = ByHand(model=theirs, optimizers=[plain], dtype=AUTOCAST.get(precision), scaler=scaler, **given)
    windows = in_windows(batches, accumulate)
    for update, window in zip(engine.updates(batches), windows, strict=True):
        if update.applied or scaler is not None:
            loop.update(window)
    return state(ours, optimizer), state(theirs, plain)


@settings(max_examples=40)
@given(sizes=Sizes, draw=st.data(), precision=st.sampled_from(list(ROUNDING)), accumulate=st.integers(1, 4))
def test_ragged_windows_are_the_loop_by_hand_to_rounding(
    sizes: list[int], draw: st.DataObject, precision: str, accumulate: int
) -> None:
    weights = draw.draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=sum(sizes), max_size=sum(sizes)))
    weights = [1.0 + w if i == 0 else w for i, w in enumerate(weights)]
    batches = in_precision(cut(samples(sum(sizes), weights=weights), sizes), precision)
    one_window = batches[:accumulate]
    ours, theirs = trained(sgd, one_window, precision, accumulate)
    assert_near(ours, theirs, rtol=ROUNDING[precision], atol=ROUNDING[precision])


@settings(max_examples=40)
@given(
    windows=st.integers(1, 4),
    precision=st.sampled_from(["fp32", "bf16", "bf16-pure"]),
    fused=st.booleans(),
    weights=st.sampled_from(
        [[1, 1, 1, 1, 1, 1, 1, 1], [4, 0, 0, 0, 1, 2, 1, 0], [0, 0, 1, 0, 0, 0, 0, 0], [2, 3, 5, 6, 0, 0, 0, 0]]
    ),
    spoilt=st.sets(st.integers(0, 15), max_size=3),
)
def test_windows_of_a_power_of_two_are_bitwise_the_loop_by_hand(
    windows: int, precision: str, fused: bool, weights: list[float], spoilt: set[int]
) -> None:
    """Skipped updates among them: the loop by hand leaves those windows out."""
    batches = in_precision(cut(samples(8 * windows, weights=weights * windows), [2] * 4 * windows), precision)
    batches = [batch.times(math.inf) if number in spoilt else batch for number, batch in enumerate(batches)]
    make = FUSED["AdamW fused"] if fused else UNFUSED["SGD"]
    assert_bitwise(*trained(make, batches, precision, 4))


@settings(max_examples=25)
@given(
    sizes=Sizes,
    fused=st.booleans(),
    accumulate=st.integers(1, 3),
    clip=st.one_of(
        st.floats(1e-3, 10.0).map(lambda most: {"clip_norm": most}), st.floats(1e-4, 1.0).map(lambda most: {"clip_value": most})
    ),
)
def test_any_clipping_is_that_of_torch_to_rounding(
    sizes: list[int], fused: bool, accumulate: int, clip: dict[str, float]
) -> None:
    make = FUSED["SGD fused"] if fused else UNFUSED["SGD"]
    ours, theirs = trained(make, cut(samples(sum(sizes)), sizes), "fp32", accumulate, **clip)
    assert_near(ours, theirs, rtol=1e-4, atol=1e-5)
