"""On a GPU the engine does what plain PyTorch with `autocast` and `GradScaler` does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LambdaLR

from gpu.models import ByHand, Labelled, adamw, distance, flat, on_device, ragged, small_model
from halfstep import Engine
from halfstep.engine import Cause
from halfstep.precision.scaler import ScalerSettings

pytestmark = pytest.mark.gpu

DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
LIMIT = {"fp32": 2e-2, "fp16": 5e-2, "bf16": 0.1}
"""Of the way that training went. AdamW's first steps have the size of the learning rate whatever the gradient is, so that a
gradient that rounds to another sign shows in full. FP32 multiplies in TF32 on both sides."""
SCALE = 2.0**12


def needs(precision: str) -> None:
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip(f"{torch.cuda.get_device_name()} has no BF16 arithmetic")


def windows_of(device: torch.device, updates: int, accumulate: int = 4) -> list[list[Labelled]]:
    batches = ragged(device, updates * accumulate)
    return [batches[start : start + accumulate] for start in range(0, len(batches), accumulate)]


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_updates_are_those_of_a_loop_by_hand(device: torch.device, precision: str, clip_norm: float | None) -> None:
    needs(precision)
    ours, theirs = small_model(device), small_model(device)
    start = flat(ours)
    scaler = ScalerSettings(init_scale=SCALE, growth_interval=3)
    engine = Engine(ours, adamw(ours), loss=on_device, precision=precision, clip_norm=clip_norm, scaler=scaler)
    plain = GradScaler("cuda", init_scale=SCALE, growth_interval=3, enabled=precision == "fp16")
    hand = ByHand(model=theirs, optimizer=adamw(theirs), dtype=DTYPES[precision], scaler=plain, clip_norm=clip_norm)
    for window in windows_of(device, 8):
        update, loss = engine.update(window), hand.update(window)
        assert update.loss == pytest.approx(loss, rel=2e-2)
    engine.settle()
    assert engine.ledger.applied == 8
    assert distance(ours, theirs, start) < LIMIT[precision]
    if precision == "fp16":
        assert engine.state_dict()["scaler"]["scale"] == plain.get_scale()


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_one_window_of_n_is_n_windows_of_one(device: torch.device, precision: str) -> None:
    """The same samples in four micro-batches and in one give the same update."""
    needs(precision)
    start = flat(small_model(device))
    moved = []
    window = ragged(device, 4)
    whole = Labelled(x=torch.cat([b.x for b in window]), labels=torch.cat([b.labels for b in window]))
    for batches in (window, [whole]):
        model = small_model(device)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        engine = Engine(model, sgd, loss=on_device, precision=precision, scaler=ScalerSettings(init_scale=SCALE))
        update = engine.update(batches)
        assert update.applied
        moved.append(flat(model) - start)
    assert float((moved[0] - moved[1]).norm() / moved[1].norm()) < 2e-2


@pytest.mark.parametrize("fused", [True, False])
def test_an_overflow_leaves_everything_bitwise_equal_and_halves_the_scale(device: torch.device, fused: bool) -> None:
    model = small_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    engine = Engine(model, optimizer, loss=on_device, precision="fp16", scaler=ScalerSettings(init_scale=SCALE))
    engine.update(ragged(device, 2))
    before, moments = flat(model), [state["exp_avg"].clone() for state in optimizer.state.values()]
    first, *others = ragged(device, 3)
    skipped = engine.update([replace(first, factor=float("inf")), *others])
    assert not skipped.applied
    assert skipped.cause is Cause.LOSS
    assert torch.equal(flat(model), before)
    assert all(torch.equal(state["exp_avg"], kept) for state, kept in zip(optimizer.state.values(), moments, strict=True))
    assert engine.update(others).scale == SCALE / 2


def test_a_window_whose_labels_are_all_masked_is_skipped_and_leaves_the_scale(device: torch.device) -> None:
    model = small_model(device)
    engine = Engine(model, adamw(model), loss=on_device, precision="fp16", scaler=ScalerSettings(init_scale=SCALE))
    engine.update(ragged(device, 1))
    before = flat(model)
    (batch,) = ragged(device, 1)
    update = engine.update([replace(batch, labels=torch.full_like(batch.labels, -100))])
    assert update.cause is Cause.NO_WEIGHT
    assert torch.equal(flat(model), before)
    assert engine.state_dict()["scaler"] == {"scale": SCALE, "growth": 1}


def test_the_scheduler_moves_one_update_late_and_yet_in_time(device: torch.device) -> None:
    """Nobody waits for the flag of an update before the next one ends; its rate is right all the same."""
    model = small_model(device)
    optimizer = adamw(model)
    scheduler = LambdaLR(optimizer, lambda steps: 0.5**steps)
    engine = Engine(model, optimizer, loss=on_device, scheduler=scheduler, precision="fp32")
    rates = []
    for number, window in enumerate(windows_of(device, 4)):
        rates.append(engine.update(window).lr)
        assert scheduler.last_epoch == number
    engine.settle()
    assert scheduler.last_epoch == 4
    assert rates == pytest.approx([1e-3, 5e-4, 2.5e-4, 1.25e-4])


def test_tf32_is_told(device: torch.device) -> None:
    torch.set_float32_matmul_precision("highest")
    model = small_model(device)
    choice = Engine(model, adamw(model), loss=on_device, precision="fp32").choices["tf32"]
    has_it = torch.cuda.get_device_capability(device) >= (8, 0)
    assert choice.value is has_it
    assert torch.get_float32_matmul_precision() == ("high" if has_it else "highest")
    assert choice.reason
