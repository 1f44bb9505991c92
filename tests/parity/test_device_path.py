"""The end of an update as on a device, where no flag is read before it must be, forced on the CPU: equal to the host's path.

The multiplier is an FP32 tensor there and a double here: bitwise the same where it is a power of two, else to FP32's rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

from halfstep import Engine
from halfstep.engine import Cause
from halfstep.errors import ModelError
from halfstep.precision.scaler import ScalerSettings
from parity.by_hand import (
    FUSED,
    OPTIMIZERS,
    UNFUSED,
    Batch,
    MakeOptimizer,
    as_if_on_a_device,
    assert_bitwise,
    assert_near,
    cut,
    micro_batches,
    samples,
    state,
    tiny_model,
    weighted_loss,
)

FP32_ROUNDING = 2e-6
LOW = ScalerSettings(init_scale=2.0**10, growth_interval=3)

every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def ends(make: MakeOptimizer, batches: Sequence[Batch], *, accumulate: int, **given: Any) -> list[dict[str, Any]]:
    """What both paths leave: parameters, optimizer, average, learning rate, ledger."""
    found = []
    for on_host in (True, False):
        model = tiny_model()
        optimizer = make(model.parameters())
        scheduler, ema = StepLR(optimizer, step_size=1, gamma=0.5), AveragedModel(model)
        engine = Engine(
            model, optimizer, loss=weighted_loss, scheduler=scheduler, ema=ema, accumulate=accumulate, scaler=LOW, **given
        )
        engine = engine if on_host else as_if_on_a_device(engine)
        list(engine.updates(batches))
        causes = [(entry.index, entry.cause, entry.scale, entry.weight) for entry in engine.ledger]
        kept = engine.state_dict()
        told = {"causes": causes, "scaler": kept["scaler"], "counters": kept["counters"], "rates": scheduler.get_last_lr()}
        found.append({**state(model, optimizer), **state(ema), **told})
    return found


@every_optimizer
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_powers_of_two_give_the_same_bits_on_both_paths(make: MakeOptimizer, precision: str) -> None:
    assert_bitwise(*ends(make, micro_batches(8), accumulate=4, precision=precision))


@every_optimizer
@pytest.mark.parametrize("clip", [{"clip_norm": 0.1}, {"clip_value": 0.01}], ids=str)
def test_clipped_and_ragged_windows_agree_to_rounding(make: MakeOptimizer, clip: dict[str, float]) -> None:
    batches = cut(samples(9, weights=[3, 0, 5, 1, 1, 0, 0, 2, 7]), [3, 2, 2, 1, 1])
    host, device = ends(make, batches, accumulate=2, precision="fp32", **clip)
    assert_near(host, device, rtol=FP32_ROUNDING, atol=FP32_ROUNDING)


@settings(max_examples=25)
@given(
    factors=st.lists(st.sampled_from([1.0, 1.0, 1.0, 1e38, math.inf, math.nan]), min_size=2, max_size=8),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    fused=st.booleans(),
)
def test_skips_at_random_micro_batches_are_the_same_on_both_paths(factors: list[float], precision: str, fused: bool) -> None:
    batches = [batch.times(factor) for batch, factor in zip(micro_batches(len(factors)), factors, strict=True)]
    make = FUSED["AdamW fused"] if fused else UNFUSED["AdamW"]
    host, device = ends(make, batches, accumulate=2, precision=precision)
    if fused and all(cause is not None for _, cause, *_ in host["causes"]):
        for end in (host, device):  # fused kernels make states of zeros in a step that they skip
            for name in [name for name in end if name.startswith("/optimizer")]:
                del end[name]
    assert_bitwise(host, device)


def test_a_window_without_weight_leaves_the_scale_alone_on_both_paths() -> None:
    """Also where the count is a tensor that nobody reads: it is no overflow, and no good update either."""
    batches = cut(samples(8, weights=[1, 1, 0, 0, 1, 1, 1, 1]), [2, 2, 2, 2])
    host, device = ends(UNFUSED["AdamW"], batches, accumulate=1, precision="fp16")
    assert_bitwise(host, device)
    assert [cause for _, cause, *_ in device["causes"]] == [None, Cause.NO_WEIGHT, None, None]
    assert device["scaler"] == {"scale": 2.0**11, "growth": 0}, "three applied updates: the growth interval"


def test_the_host_waits_for_no_flag_before_the_next_update_ends() -> None:
    model = tiny_model()
    optimizer = FUSED["AdamW fused"](model.parameters())
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    engine = as_if_on_a_device(Engine(model, optimizer, loss=weighted_loss, scheduler=scheduler, precision="fp32"))
    first, second = micro_batches(2)
    one = engine.update([first])
    assert repr(one) == "Update(index=1, not known yet)"
    assert (len(engine.ledger), scheduler.get_last_lr()) == (0, [0.01])
    two = engine.update([second])
    assert repr(one) == "Update(index=1, applied)"
    assert (len(engine.ledger), scheduler.get_last_lr()) == (1, [0.005])
    assert (one.lr, two.lr) == (0.01, 0.005), "the scheduler moved late, and yet before the second step"


def test_looking_at_an_update_settles_it() -> None:
    model = tiny_model()
    engine = as_if_on_a_device(Engine(model, FUSED["AdamW fused"](model.parameters()), loss=weighted_loss, precision="fp32"))
    update = engine.update(micro_batches(1))
    assert update.applied
    assert engine.ledger.applied == 1


def test_a_skip_is_diagnosed_one_update_late_and_moves_nothing() -> None:
    model = tiny_model()
    optimizer = FUSED["AdamW fused"](model.parameters())
    engine = as_if_on_a_device(Engine(model, optimizer, loss=weighted_loss, precision="fp32"))
    good, bad, next_one = micro_batches(3)
    engine.update([good])
    before = state(model, optimizer)
    skipped = engine.update([bad.times(math.inf)])
    assert_bitwise(before, state(model, optimizer))
    engine.update([next_one])
    assert skipped.skipped_because == "loss not finite: the loss is inf"
    assert engine.ledger.applied == 1
    engine.settle()
    assert engine.ledger.applied == 2


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fused_sgd_that_skips_its_first_step_does_not_make_momentum_of_garbage(momentum: float) -> None:
    """torch makes the buffers uninitialised, before the kernel looks at the flag."""
    kept = []
    for first in (math.inf, None):
        model = tiny_model()
        optimizer = SGD(model.parameters(), lr=0.05, momentum=momentum, fused=True)
        engine = as_if_on_a_device(Engine(model, optimizer, loss=weighted_loss, precision="fp32"))
        bad, *good = micro_batches(4)
        if first is not None:
            assert not engine.update([bad.times(first)]).applied
        for batch in good:
            engine.update([batch])
        engine.settle()
        kept.append(state(model, optimizer))
    assert_bitwise(*kept)


def test_max_updates_counts_what_is_not_settled_yet() -> None:
    model = tiny_model()
    engine = as_if_on_a_device(Engine(model, FUSED["AdamW fused"](model.parameters()), loss=weighted_loss, precision="fp32"))
    batches = micro_batches(8)
    batches[1] = batches[1].times(math.inf)
    done = list(engine.updates(batches, max_updates=4))
    assert [update.applied for update in done] == [True, False, True, True, True]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_loss_norm_weight_and_scale_of_an_update_are_the_same_on_both_paths(precision: str) -> None:
    seen = []
    for on_host in (True, False):
        model = tiny_model()
        engine = Engine(model, UNFUSED["AdamW"](model.parameters()), loss=weighted_loss, precision=precision, scaler=LOW)
        engine = engine if on_host else as_if_on_a_device(engine)
        update = engine.update(cut(samples(5, weights=[3, 0, 1, 1, 2]), [2, 3]))
        seen.append((update.loss, update.grad_norm, update.weight, update.scale))
    assert seen[0] == pytest.approx(seen[1], rel=FP32_ROUNDING)
    assert seen[0][2:] == (7.0, 2.0**10 if precision == "fp16" else 1.0)
    assert not torch.tensor(seen).isnan().any()


@pytest.mark.parametrize(("weight", "said"), [(-2.0, "-2"), (math.inf, "inf")])
def test_a_weight_that_is_no_count_is_told_when_it_arrives(weight: float, said: str) -> None:
    """On the host before the step, on a device with the skip flag."""

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return weighted_loss(model, batch)[0], torch.tensor(weight)

    for on_host in (True, False):
        model = tiny_model()
        engine = Engine(model, UNFUSED["SGD"](model.parameters()), loss=loss, precision="fp32")
        engine = engine if on_host else as_if_on_a_device(engine)
        with pytest.raises(ModelError) as told:
            list(engine.updates(micro_batches(1)))
        assert str(told.value) == (
            f"The weights of a window add up to {said}; a weight counts tokens or samples: 0 or more, and finite."
        )
