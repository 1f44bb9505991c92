"""The engine against the loop by hand, over optimizers, precisions and clipping.

Where windows weigh a power of two, every factor is one, and scaling by it is exact: the two must agree to the last bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from halfstep import Engine
from parity.by_hand import (
    FUSED,
    OPTIMIZERS,
    UNFUSED,
    Batch,
    ByHand,
    MakeOptimizer,
    as_if_on_a_device,
    assert_bitwise,
    assert_near,
    cut,
    in_windows,
    mean_loss,
    micro_batches,
    samples,
    state,
    tiny_model,
    weighted_loss,
)

FP32_ROUNDING = 2e-6
"""A few units in the last place of FP32 (1.2e-7), over a few updates."""
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16}

every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
fused_or_not = pytest.mark.parametrize("make", [UNFUSED["AdamW"], FUSED["AdamW fused"]], ids=["unfused", "fused"])


def both(
    make: MakeOptimizer, batches: list[Batch], *, precision: str, accumulate: int, mean: bool = False, **given: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What engine and hand make of the same micro-batches."""
    ours, theirs = tiny_model(), tiny_model()
    optimizer, plain = make(ours.parameters()), make(theirs.parameters())
    loss = mean_loss if mean else weighted_loss
    list(Engine(ours, optimizer, loss=loss, precision=precision, accumulate=accumulate, **given).updates(batches))
    loop = ByHand(model=theirs, optimizers=[plain], dtype=AUTOCAST[precision], mean=mean, **given)
    for window in in_windows(batches, accumulate):
        loop.update(window)
    return state(ours, optimizer), state(theirs, plain)


@every_optimizer
@pytest.mark.parametrize("precision", AUTOCAST)
def test_windows_of_a_power_of_two_are_bitwise_the_loop_by_hand(make: MakeOptimizer, precision: str) -> None:
    assert_bitwise(*both(make, micro_batches(12), precision=precision, accumulate=4))


@every_optimizer
def test_means_of_four_micro_batches_are_bitwise_the_loop_by_hand(make: MakeOptimizer) -> None:
    assert_bitwise(*both(make, micro_batches(12), precision="fp32", accumulate=4, mean=True))


@every_optimizer
def test_ragged_weights_are_the_loop_by_hand(make: MakeOptimizer) -> None:
    batches = cut(samples(9, weights=[3, 0, 5, 1, 1, 0, 0, 2, 7]), [3, 2, 2, 1, 1])
    assert_near(*both(make, batches, precision="fp32", accumulate=2), rtol=FP32_ROUNDING, atol=FP32_ROUNDING)


@every_optimizer
@pytest.mark.parametrize("clip", [{"clip_norm": 0.1}, {"clip_norm": 1e6}, {"clip_value": 0.01}], ids=str)
def test_clipping_is_that_of_torch(make: MakeOptimizer, clip: dict[str, float]) -> None:
    ours, theirs = both(make, micro_batches(8), precision="fp32", accumulate=4, **clip)
    assert_near(ours, theirs, rtol=FP32_ROUNDING, atol=FP32_ROUNDING)


@fused_or_not
def test_clipping_by_value_is_bitwise_that_of_torch(make: MakeOptimizer) -> None:
    assert_bitwise(*both(make, micro_batches(8), precision="fp32", accumulate=4, clip_value=0.01))


@fused_or_not
def test_clipping_that_does_not_bite_changes_no_bit(make: MakeOptimizer) -> None:
    free, _ = both(make, micro_batches(8), precision="fp32", accumulate=4)
    clipped, _ = both(make, micro_batches(8), precision="fp32", accumulate=4, clip_norm=1e6)
    assert_bitwise(free, clipped)


@fused_or_not
def test_pure_bf16_is_bitwise_the_loop_by_hand_on_a_bf16_model(make: MakeOptimizer) -> None:
    ours, theirs = tiny_model(), tiny_model().bfloat16()
    optimizer, plain = make(ours.parameters()), make(theirs.parameters())
    batches = micro_batches(8, dtype=torch.bfloat16)
    list(Engine(ours, optimizer, loss=weighted_loss, precision="bf16-pure", accumulate=4).updates(batches))
    loop = ByHand(model=theirs, optimizers=[plain])
    for window in in_windows(batches, 4):
        loop.update(window)
    assert_bitwise(state(ours, optimizer), state(theirs, plain))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Biases without weight decay, the last layer at another rate, as one writes it."""
    first, *_, last = model
    return [
        {"params": [first.weight]},
        {"params": [first.bias], "weight_decay": 0.0},
        {"params": list(model[1].parameters()) + list(last.parameters()), "lr": 0.002},
    ]


@fused_or_not
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.1}], ids=["free", "clipped"])
def test_parameter_groups_share_one_norm_and_keep_their_own_rates(make: MakeOptimizer, clip: dict[str, float]) -> None:
    ours, theirs = tiny_model(), tiny_model()
    optimizer, plain = make(groups_of(ours)), make(groups_of(theirs))
    batches = micro_batches(8)
    engine = Engine(ours, optimizer, loss=weighted_loss, precision="fp32", accumulate=4, **clip)
    rates = {update.lr for update in engine.updates(batches)}
    loop = ByHand(model=theirs, optimizers=[plain], **clip)
    for window in in_windows(batches, 4):
        loop.update(window)
    assert rates == {0.01}
    assert_near(state(ours, optimizer), state(theirs, plain), rtol=FP32_ROUNDING, atol=FP32_ROUNDING)


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.1}], ids=["free", "clipped"])
def test_several_optimizers_share_one_norm_and_one_step(clip: dict[str, float]) -> None:
    """The usual pair: one for matrices, one for the rest; fused and not fused together."""
    ends = []
    for by_engine in (True, False):
        model = tiny_model()
        matrices = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() < 2]
        optimizers = [SGD(matrices, lr=0.1, momentum=0.9), AdamW(rest, lr=0.01, fused=True)]
        if by_engine:
            list(Engine(model, optimizers, loss=weighted_loss, precision="fp32", accumulate=4, **clip).updates(micro_batches(8)))
        else:
            loop = ByHand(model=model, optimizers=optimizers, **clip)
            for window in in_windows(micro_batches(8), 4):
                loop.update(window)
        ends.append(state(model, *optimizers))
    assert_near(*ends, rtol=FP32_ROUNDING, atol=FP32_ROUNDING)


@pytest.mark.parametrize(("precision", "rounding"), [("fp32", FP32_ROUNDING), ("bf16", 2**-8)], ids=["fp32", "bf16"])
def test_the_norm_is_that_of_the_true_gradient(precision: str, rounding: float) -> None:
    """To the rounding of backward's own numbers, since a factor of 1 / 19 comes before it here and after it there."""
    model, plain = tiny_model(), tiny_model()
    window = cut(samples(9, weights=[3, 0, 5, 1, 1, 0, 0, 2, 7]), [3, 2, 2, 1, 1])
    update = Engine(model, SGD(model.parameters(), lr=0.1), loss=weighted_loss, precision=precision).update(window)
    loop = ByHand(model=plain, optimizers=[SGD(plain.parameters(), lr=0.1)], dtype=AUTOCAST[precision])
    loop.update(window)
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert update.grad_norm == pytest.approx(norm.item(), rel=rounding)


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16() -> None:
    model = tiny_model()
    update = Engine(model, SGD(model.parameters(), lr=0.1), loss=weighted_loss, precision="bf16-pure").update(
        micro_batches(4, dtype=torch.bfloat16)
    )
    plain = tiny_model().bfloat16()
    ByHand(model=plain, optimizers=[SGD(plain.parameters(), lr=0.0)]).update(micro_batches(4, dtype=torch.bfloat16))
    norm = torch.stack([p.grad.double().norm() for p in plain.parameters()]).norm()
    assert update.grad_norm == pytest.approx(norm.item(), rel=FP32_ROUNDING)


class WithAWideLayer(nn.Module):
    """A gradient that is large enough to be read by a dot product, beside small ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.out = nn.Linear(256, 300), nn.Linear(300, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.wide(x))


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_the_norm_of_large_gradients_is_that_of_torch(on_host: bool) -> None:
    model = WithAWideLayer()
    engine = Engine(model, SGD(model.parameters(), lr=0.0), precision="fp32")
    engine = engine if on_host else as_if_on_a_device(engine)
    x = torch.randn(3, 256)
    with engine.window() as window:
        window.backward(model(x).square().sum())
    model(x).square().sum().backward()
    norm = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()
    assert window.update.grad_norm == pytest.approx(norm.item(), rel=1e-6)
