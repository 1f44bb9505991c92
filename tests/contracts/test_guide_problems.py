"""Problems 1 and 3 of the guide, provoked on purpose: the loss becomes NaN, BF16 does not converge."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

from halfstep import Engine
from halfstep.engine import Cause
from halfstep.precision.scaler import ScalerSettings
from parity.by_hand import Batch, assert_bitwise, mean_loss, micro_batches, state, tiny_model

LOW = ScalerSettings(init_scale=2.0**10)


def is_finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


def test_problem_1_a_scale_that_is_too_high_calibrates_itself_and_no_nan_reaches_the_weights() -> None:
    """The scale needs no `update()` that one could forget, and its history is in the ledger."""
    model = tiny_model()
    settings = ScalerSettings(init_scale=2.0**24)
    optimizer = AdamW(model.parameters(), lr=0.01)
    engine = Engine(model, optimizer, loss=mean_loss, precision="fp16", accumulate=4, scaler=settings)
    updates = list(engine.updates(micro_batches(4), epochs=40))
    first = next(number for number, update in enumerate(updates) if update.applied)
    assert first > 0
    assert {update.cause for update in updates[:first]} == {Cause.CALIBRATION}
    assert [update.scale for update in updates[: first + 1]] == [2.0 ** (24 - n) for n in range(first + 1)]
    assert is_finite(model)
    assert updates[-1].loss < updates[first].loss


def test_problem_1_an_outlier_in_the_data_costs_one_update() -> None:
    """1e6 is finite in the batch and infinite in FP16: the forward overflows, which no scale cures."""
    model = tiny_model()
    good, outlier = micro_batches(2)
    outlier.x[1, 0] = 1e6
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, precision="fp16", scaler=LOW)
    before = engine.update([good])
    kept = state(model)
    spoilt = engine.update([good, outlier])
    assert before.applied
    assert (spoilt.cause, math.isfinite(spoilt.loss)) == (Cause.LOSS, False)
    assert_bitwise(kept, state(model))
    assert engine.update([good]).scale == 2.0**9, "it was halved once, as GradScaler would"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_problem_1_a_learning_rate_that_is_too_high_stops_with_finite_weights(precision: str, tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    settings = ScalerSettings(init_scale=1.0, floor=2.0**-3)
    optimizer = SGD(model.parameters(), lr=1e3)
    engine = Engine(model, optimizer, loss=mean_loss, precision=precision, max_skips=3, scaler=settings, evidence=tmp_path)
    with pytest.raises(RuntimeError, match=r"^Stopped at update \d+: .*the largest weight is \d"):
        list(engine.updates(micro_batches(4), epochs=100))
    assert is_finite(model)


class Fp32Inside(torch.autograd.Function):
    """A kernel that has FP32 only: it casts its input, and gives FP32 back."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (1 - x.tanh() ** 2)


class WithKernel(nn.Module):
    def __init__(self, kernel: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.kernel = nn.Linear(4, 16), nn.Linear(16, 2), kernel

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.kernel(self.first(x)))


def final_loss(precision: str, kernel: Callable[[Tensor], Tensor]) -> float:
    model = WithKernel(kernel)
    engine = Engine(model, AdamW(model.parameters(), lr=0.02), loss=mean_loss, precision=precision, accumulate=2, scaler=LOW)
    updates = list(engine.updates(micro_batches(8), epochs=25))
    return sum(update.loss for update in updates[-4:]) / 4


def test_problem_3_bf16_converges_as_fp32_does() -> None:
    """With a kernel that falls back to FP32 as well: it costs time, not convergence."""
    exact = final_loss("fp32", torch.tanh)
    for kernel in (torch.tanh, Fp32Inside.apply):
        assert final_loss("bf16", kernel) == pytest.approx(exact, rel=0.15, abs=0.01)
        assert final_loss("fp16", kernel) == pytest.approx(exact, rel=0.15, abs=0.01)
    start = mean_loss(WithKernel(torch.tanh), micro_batches(1)[0]).item()
    assert exact < start / 2


def moved(precision: str, lr: float) -> float:
    """How far an update whose gradient is 1 moves a weight of 1."""
    line = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        line.weight.fill_(1.0)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch.to(model.weight.dtype)).float().sum()

    engine = Engine(line, SGD(line.parameters(), lr=lr), loss=loss, precision=precision)
    list(engine.updates([torch.ones(1, 1)] * 8))
    return 1.0 - line.weight.float().item()


def test_problem_3_updates_that_bf16_weights_lose_are_kept_by_fp32_master_weights() -> None:
    """Beside 1, BF16 has nothing between 0 and 2^-8: eight steps of 2^-10 are lost, each by itself."""
    assert moved("bf16", lr=2.0**-10) == 8 * 2.0**-10
    assert moved("bf16-pure", lr=2.0**-10) == 0.0
    assert moved("bf16-pure", lr=2.0**-8) == 8 * 2.0**-8


def test_problem_3_the_cast_cache_does_not_change_a_bit() -> None:
    """The guide advises to switch `cache_enabled` off to find out: it is no cause here."""
    ends = []
    for cached in (True, False):
        model = tiny_model()

        def loss(model: nn.Module, batch: Batch, cached: bool = cached) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
                return F.mse_loss(model(batch.x).float(), batch.y)

        engine = Engine(model, AdamW(model.parameters()), loss=loss, precision="bf16", accumulate=2)
        list(engine.updates(micro_batches(4)))
        ends.append(state(model))
    assert_bitwise(*ends)
