"""What other trainers get wrong, each as a scenario that the engine passes (those of one process and of training alone)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from halfstep import Engine
from halfstep.engine import Cause
from halfstep.precision.scaler import ScalerSettings
from parity.by_hand import Batch, ByHand, as_if_on_a_device, assert_bitwise, mean_loss, micro_batches, state, tiny_model

LOW = ScalerSettings(init_scale=2.0**10)
both_paths = pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])


@both_paths
@pytest.mark.parametrize("fused", [True, False])
def test_the_scheduler_does_not_advance_on_a_skip(fused: bool, on_host: bool) -> None:
    """Accelerate asks whether `step` was called, which fused optimizers are; Lightning and Composer do not ask."""
    model = tiny_model()
    optimizer = AdamW(model.parameters(), lr=1.0, fused=fused)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    engine = Engine(model, optimizer, loss=mean_loss, scheduler=scheduler, precision="fp16", scaler=LOW)
    engine = engine if on_host else as_if_on_a_device(engine)
    batches = [batch.times(math.inf) if number < 3 else batch for number, batch in enumerate(micro_batches(5))]
    list(engine.updates(batches))
    assert (scheduler.last_epoch, scheduler.get_last_lr()) == (2, [0.25])


def test_the_last_window_is_divided_by_what_is_in_it() -> None:
    """Accelerate and Lightning divide by the full window's number, so that its gradients are too small."""
    model, plain = tiny_model(), tiny_model()
    batches = micro_batches(5)
    list(Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, precision="fp32", accumulate=4).updates(batches))
    loop = ByHand(model=plain, optimizers=[SGD(plain.parameters(), lr=0.1)], mean=True)
    loop.update(batches[:4])
    loop.update(batches[4:])
    assert_bitwise(state(model), state(plain))


def test_gradients_of_a_dropped_tail_do_not_reach_the_next_epoch() -> None:
    """torchtune leaves them in `.grad`."""
    model, plain = tiny_model(), tiny_model()
    given = {"loss": mean_loss, "precision": "fp32", "accumulate": 4, "tail": "drop"}
    list(Engine(model, SGD(model.parameters(), lr=0.1), **given).updates(micro_batches(6), epochs=2))
    loop = ByHand(model=plain, optimizers=[SGD(plain.parameters(), lr=0.1)], mean=True)
    for _ in range(2):
        loop.update(micro_batches(6)[:4])
    assert_bitwise(state(model), state(plain))


def test_fp16_on_a_cpu_is_fp16() -> None:
    """Accelerate runs it in FP32 without a word."""
    seen: list[torch.dtype] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch.x)
        seen.append(out.dtype)
        return (out.float() - batch.y).square().mean()

    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=loss, precision="fp16", scaler=LOW)
    update = engine.update(micro_batches(1))
    assert (seen, update.scale, update.applied) == ([torch.float16], 2.0**10, True)


@both_paths
@pytest.mark.parametrize("fused", [True, False])
def test_clipping_an_overflow_skips_and_does_not_raise(fused: bool, on_host: bool) -> None:
    """Fabric's `clip_gradients` raises on what FP16 does every so often."""
    model = tiny_model()
    engine = Engine(model, AdamW(model.parameters(), fused=fused), loss=mean_loss, precision="fp16", clip_norm=1.0, scaler=LOW)
    engine = engine if on_host else as_if_on_a_device(engine)
    good, bad = micro_batches(2)
    assert engine.update([good]).applied
    assert engine.update([bad.times(1e38)]).cause is Cause.OVERFLOW
    assert engine.update([good]).applied


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_inputs_and_targets_are_not_cast(precision: str) -> None:
    """Fabric casts every floating-point tensor of a batch: targets lose their digits before the loss sees them."""
    seen: list[torch.dtype] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.extend(tensor.dtype for tensor in batch.values())
        return (model(batch["x"]).double() - batch["y"]).square().mean()

    model = tiny_model()
    batch = {"x": torch.randn(2, 4), "y": torch.tensor([[1.000001, 2.0], [3.0, 4.0]], dtype=torch.float64)}
    Engine(model, SGD(model.parameters(), lr=0.1), loss=loss, precision=precision, scaler=LOW).update([batch])
    assert seen == [torch.float32, torch.float64]


def test_a_nan_loss_is_reported_as_nan() -> None:
    """HF Trainer's default logs the average of the others in its place."""
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, precision="fp32")
    losses = [
        u.loss for u in engine.updates([batch.times(f) for batch, f in zip(micro_batches(3), (1, math.nan, 1), strict=True)])
    ]
    assert [math.isnan(loss) for loss in losses] == [False, True, False]


def test_the_loss_reported_is_not_divided_by_accumulation() -> None:
    model = tiny_model()
    batches = micro_batches(4)
    expected = sum(mean_loss(model, batch).item() for batch in batches) / 4
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, precision="fp32")
    assert engine.update(batches).loss == pytest.approx(expected, rel=1e-6)


def test_a_size_of_micro_batches_that_is_kept_has_been_computed() -> None:
    """Lightning's finder returns sizes that it never tried."""
    tried: list[int] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        tried.append(len(batch.x))
        if len(batch.x) > 3:
            raise torch.OutOfMemoryError
        return mean_loss(model, batch)

    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=loss, precision="fp32")
    engine.update(micro_batches(2, 12))
    parts = engine.choices["micro_batch_parts"].value
    assert tried.count(12 // parts) == 2 * parts


def test_an_accumulated_window_is_one_step_and_not_a_step_after_1_n_n() -> None:
    """Fabric's documented example steps where the index divides."""
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, precision="fp32", accumulate=4)
    assert [update.micro_batches for update in engine.updates(micro_batches(9))] == [4, 4, 1]
