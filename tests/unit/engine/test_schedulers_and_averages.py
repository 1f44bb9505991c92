"""What moves with applied updates and with nothing else."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from halfstep import Engine
from halfstep.engine.batch import map_tensors
from halfstep.errors import ModelError
from halfstep.precision.scaler import ScalerSettings
from parity.by_hand import (
    ByHand,
    as_if_on_a_device,
    assert_bitwise,
    assert_near,
    in_windows,
    mean_loss,
    micro_batches,
    state,
    tiny_model,
)

on_both_paths = pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])


def engine_with(scheduler: Any, *, on_host: bool = True, lr: float = 0.1, **given: Any) -> tuple[Engine, Any]:
    model = tiny_model()
    optimizer = SGD(model.parameters(), lr=lr)
    made = scheduler(optimizer)
    options = {"precision": "fp32", **given}
    engine = Engine(model, optimizer, loss=mean_loss, scheduler=made, **options)
    return (engine if on_host else as_if_on_a_device(engine)), made


SCHEDULERS = {
    "warm-up and cosine": lambda o: SequentialLR(
        o, [LinearLR(o, start_factor=0.1, total_iters=3), CosineAnnealingLR(o, T_max=5)], milestones=[3]
    ),
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.2, total_steps=20),
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
}


@on_both_paths
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_scheduler_moves_once_an_update_and_not_once_a_micro_batch(make: Any, on_host: bool) -> None:
    engine, _ = engine_with(make, on_host=on_host, accumulate=2)
    rates = [update.lr for update in engine.updates(micro_batches(16))]
    plain = SGD(tiny_model().parameters(), lr=0.1)
    by_hand = make(plain)
    expected = []
    for _ in range(8):
        expected.append(plain.param_groups[0]["lr"])
        plain.step()
        by_hand.step()
    assert rates == expected


@on_both_paths
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_scheduler_stands_still_in_a_skipped_update_and_warns_of_nothing(precision: str, on_host: bool) -> None:
    """The first update is skipped, as FP16's often is: by hand, torch warns that the scheduler moved before the optimizer."""
    engine, _ = engine_with(SCHEDULERS["lambda"], on_host=on_host, precision=precision, scaler=ScalerSettings(init_scale=2.0**10))
    batches = micro_batches(5)
    for bad in (0, 3):
        batches[bad] = batches[bad].times(math.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        updates = list(engine.updates(batches))
    assert [update.lr for update in updates] == pytest.approx([0.1, 0.1, 0.05, 0.1 / 3, 0.1 / 3])


def test_several_schedulers_move_together() -> None:
    model = tiny_model()
    matrices, rest = [p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() < 2]
    optimizers = [SGD(matrices, lr=0.1), SGD(rest, lr=0.2)]
    schedulers = [LambdaLR(optimizer, lambda step: 0.5**step) for optimizer in optimizers]
    engine = Engine(model, optimizers, loss=mean_loss, scheduler=schedulers, precision="fp32")
    list(engine.updates(micro_batches(3)))
    assert [scheduler.get_last_lr() for scheduler in schedulers] == [[0.1 / 8], [0.2 / 8]]


def test_a_plateau_scheduler_moves_by_its_metric_alone() -> None:
    engine, plateau = engine_with(lambda o: ReduceLROnPlateau(o, factor=0.5, patience=1))
    list(engine.updates(micro_batches(4)))
    assert plateau.last_epoch == 0
    assert [engine.plateau(metric) for metric in (1.0, 1.0, 1.0, 1.0)] == [1.0] * 4
    assert plateau.get_last_lr() == [0.05]


def test_a_plateau_scheduler_beside_one_an_update() -> None:
    model = tiny_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    plateau, each = ReduceLROnPlateau(optimizer, patience=0), LambdaLR(optimizer, lambda step: 1.0)
    engine = Engine(model, optimizer, loss=mean_loss, scheduler=[plateau, each], precision="fp32")
    list(engine.updates(micro_batches(3)))
    assert (each.last_epoch, plateau.last_epoch) == (3, 0)
    assert engine.plateau(6.0, weight=2.0) == 6.0


@on_both_paths
def test_an_average_is_bitwise_the_one_by_hand(on_host: bool) -> None:
    model, plain = tiny_model(), tiny_model()
    ours, theirs = (AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for m in (model, plain))
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, ema=ours, precision="fp32", accumulate=2)
    engine = engine if on_host else as_if_on_a_device(engine)
    list(engine.updates(micro_batches(8)))
    loop = ByHand(model=plain, optimizers=[SGD(plain.parameters(), lr=0.1)], mean=True)
    for window in in_windows(micro_batches(8), 2):
        loop.update(window)
        theirs.update_parameters(plain)
    assert_bitwise(state(ours), state(theirs))
    assert int(ours.n_averaged) == 4


def test_an_average_over_all_weights_at_once_cannot_mix_fp32_with_bf16() -> None:
    model = tiny_model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with pytest.raises(ModelError) as caught:
        Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, ema=average, precision="bf16-pure")
    assert str(caught.value) == (
        "`ema` was made before the weights became BF16, and its `multi_avg_fn` takes one number format. Give "
        "`AveragedModel` an `avg_fn`, as `get_ema_avg_fn(decay)`: the average then stays FP32, in which it loses nothing."
    )


def test_an_average_of_each_weight_by_itself_stays_fp32_over_bf16_weights() -> None:
    model = tiny_model()
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9))
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, ema=average, precision="bf16-pure")
    for batch in micro_batches(2):
        engine.update([map_tensors(batch, lambda tensor: tensor.bfloat16() if tensor.is_floating_point() else tensor)])
    engine.settle()
    assert {parameter.dtype for parameter in average.module.parameters()} == {torch.float32}
    assert int(average.n_averaged) == 2


@on_both_paths
def test_max_updates_counts_applied_updates(on_host: bool) -> None:
    engine, _ = engine_with(SCHEDULERS["lambda"], on_host=on_host)
    batches = [batch.times(math.inf) if number % 2 else batch for number, batch in enumerate(micro_batches(8))]
    updates = list(engine.updates(batches, epochs=None, max_updates=5))
    assert sum(update.applied for update in updates) == 5
    assert len(updates) == 9
    assert (engine.ledger.applied, engine.counters.micro_batches) == (5, 9)


def test_weight_of_applied_updates_is_counted() -> None:
    model = tiny_model()
    engine = Engine(
        model, SGD(model.parameters(), lr=0.1), loss=lambda m, b: (mean_loss(m, b), torch.tensor(3)), precision="fp32"
    )
    list(engine.updates(micro_batches(4)))
    assert (engine.counters.weight, engine.counters.micro_batches, engine.counters.samples) == (12.0, 4, 8)


@pytest.mark.parametrize("fused", [True, False])
def test_a_learning_rate_may_be_a_tensor(fused: bool) -> None:
    ends = []
    for lr in (torch.tensor(0.01), 0.01):
        model = tiny_model()
        optimizer = AdamW(model.parameters(), lr=lr, fused=fused, foreach=False)
        updates = list(Engine(model, optimizer, loss=mean_loss, precision="fp32").updates(micro_batches(2)))
        assert [update.lr for update in updates] == pytest.approx([0.01, 0.01])
        ends.append(state(model))
    assert_near(*ends, rtol=2e-6, atol=2e-6)
