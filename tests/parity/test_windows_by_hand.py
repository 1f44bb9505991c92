"""Windows of the caller's own: several losses, several backward calls, GANs, gradient penalties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer

from halfstep import Engine
from halfstep.engine import Cause, Window
from halfstep.precision.scaler import ScalerSettings
from parity.by_hand import ByHand, assert_bitwise, assert_near, mean_loss, micro_batches, state, tiny_model, weighted_loss

SCALE = 2.0**10
LOW = ScalerSettings(init_scale=SCALE)
NOISE, SIZE = 3, 4
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
every_precision = pytest.mark.parametrize("precision", AUTOCAST)


def with_momentum(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


@every_precision
def test_a_window_of_the_callers_own_is_bitwise_an_update_of_the_engine(precision: str) -> None:
    batches = micro_batches(4)
    ends = []
    for by_window in (True, False):
        model = tiny_model()
        optimizer = with_momentum(model)
        engine = Engine(model, optimizer, loss=weighted_loss, precision=precision, scaler=LOW)
        if by_window:
            with engine.window() as window:
                for batch in batches:
                    with window.forward():
                        loss = weighted_loss(model, batch)
                    window.backward(*loss)
            update = window.update
        else:
            update = engine.update(batches)
        told = (update.loss, update.grad_norm, update.weight, update.micro_batches, update.applied)
        ends.append({**state(model, optimizer), "told": told})
    assert_bitwise(*ends)


@every_precision
def test_a_second_loss_of_weight_zero_is_added_and_not_counted(precision: str) -> None:
    """Two backward calls for each micro-batch are one call on the sum of the losses: equal to the rounding of the sum."""
    batches = micro_batches(4)
    ends = []
    for apart in (True, False):
        model = tiny_model()
        optimizer = with_momentum(model)
        engine = Engine(model, optimizer, precision=precision, scaler=LOW)
        with engine.window() as window:
            for batch in batches:
                with window.forward():
                    total, weight = weighted_loss(model, batch)
                    penalty = 0.5 * model(batch.x).float().abs().sum()
                if apart:
                    window.backward(total, weight)
                    window.backward(penalty, weight=0)
                else:
                    window.backward(total + penalty, weight)
        assert window.update.weight == 8.0
        ends.append(state(model, optimizer))
    rounding = 2e-6 if precision == "fp32" else 2**-6
    assert_near(*ends, rtol=rounding, atol=rounding)


def test_a_graph_that_is_kept_takes_two_backward_calls() -> None:
    model, plain = tiny_model(), tiny_model()
    (batch,) = micro_batches(1)
    engine = Engine(model, with_momentum(model), precision="fp32")
    with engine.window() as window:
        with window.forward():
            loss = mean_loss(model, batch)
        window.backward(loss, retain_graph=True)
        window.backward(loss)
    ByHand(model=plain, optimizers=[with_momentum(plain)], mean=True).update([batch])
    assert_near(state(model), state(plain), rtol=2e-6, atol=2e-6)


def generator() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(NOISE, 8), nn.ReLU(), nn.Linear(8, SIZE))


def critic() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(SIZE, 8), nn.LeakyReLU(), nn.Linear(8, 1))


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.01, betas=(0.5, 0.9))


def real_and_noise(step: int, micro: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 * step + micro)
    return torch.randn(5, SIZE, generator=source), torch.randn(5, NOISE, generator=source)


def critic_loss(d: nn.Module, g: nn.Module, real: Tensor, noise: Tensor) -> Tensor:
    with torch.no_grad():
        fake = g(noise)
    return F.softplus(-d(real).float()).mean() + F.softplus(d(fake).float()).mean()


def generator_loss(d: nn.Module, g: nn.Module, noise: Tensor) -> Tensor:
    return F.softplus(-d(g(noise)).float()).mean()


def gan_by_engines(precision: str, steps: int) -> dict[str, Any]:
    d, g = critic(), generator()
    optimizers = adam(d), adam(g)
    for_d = Engine(d, optimizers[0], precision=precision, scaler=LOW)
    for_g = Engine(g, optimizers[1], precision=precision, scaler=LOW)
    for step in range(steps):
        with for_d.window() as window:
            for micro in range(2):
                with window.forward():
                    loss = critic_loss(d, g, *real_and_noise(step, micro))
                window.backward(loss)
        with for_g.window() as window:
            for micro in range(2):
                with window.forward():
                    loss = generator_loss(d, g, real_and_noise(step, micro)[1])
                window.backward(loss)
    return {**state(d, optimizers[0]), **{f"g {name}": value for name, value in state(g, optimizers[1]).items()}}


def gan_by_hand(precision: str, steps: int) -> dict[str, Any]:
    d, g = critic(), generator()
    optimizers, dtype = (adam(d), adam(g)), AUTOCAST[precision]
    scalers = [GradScaler("cpu", init_scale=2 * SCALE) if precision == "fp16" else None for _ in optimizers]
    loops = [
        ByHand(model=model, optimizers=[optimizer], dtype=dtype, scaler=scaler)
        for model, optimizer, scaler in zip((d, g), optimizers, scalers, strict=True)
    ]
    for step in range(steps):
        for number, loop in enumerate(loops):
            loop.optimizers[0].zero_grad()
            for micro in range(2):
                real, noise = real_and_noise(step, micro)
                with loop._autocast():
                    loss = generator_loss(d, g, noise) if number else critic_loss(d, g, real, noise)
                loop._scaled(loss, 2.0).backward()
            loop.step()
    return {**state(d, optimizers[0]), **{f"g {name}": value for name, value in state(g, optimizers[1]).items()}}


@every_precision
def test_a_gan_with_two_engines_is_bitwise_the_one_by_hand(precision: str) -> None:
    """The generator's loss leaves gradients in the critic: they must not reach the critic's next update."""
    assert_bitwise(gan_by_engines(precision, steps=4), gan_by_hand(precision, steps=4))


def gradient_penalty(d: nn.Module, gradients: tuple[Tensor, ...]) -> Tensor:
    return sum((gradient.norm(dim=1) - 1).square().mean() for gradient in gradients)


def penalised(precision: str, scale: float) -> tuple[dict[str, Any], list[float]]:
    """Three updates of a critic with the penalty of WGAN-GP."""
    d = critic()
    optimizer = adam(d)
    engine = Engine(d, optimizer, precision=precision, scaler=ScalerSettings(init_scale=scale))
    norms = []
    for step in range(3):
        real, _ = real_and_noise(step, 0)
        with engine.window() as window:
            with window.forward():
                x = real.clone().requires_grad_()
                scores = d(x)
                loss = scores.float().mean() + 10 * gradient_penalty(d, window.grad(scores, [x]))
            window.backward(loss)
        norms.append(window.update.grad_norm)
        assert window.update.applied
    return state(d, optimizer), norms


def test_a_gradient_penalty_is_bitwise_the_one_by_hand() -> None:
    d = critic()
    optimizer = adam(d)
    for step in range(3):
        x = real_and_noise(step, 0)[0].clone().requires_grad_()
        scores = d(x)
        loss = scores.mean() + 10 * gradient_penalty(d, torch.autograd.grad(scores.sum(), [x], create_graph=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert_bitwise(penalised("fp32", 1.0)[0], state(d, optimizer))


def test_a_gradient_penalty_does_not_depend_on_the_loss_scale() -> None:
    """Scales are powers of two and nothing here is near FP16's ends, so that the same bits come of both."""
    scaled, norms = penalised("fp16", 2.0**6)
    plain, plain_norms = penalised("fp16", 1.0)
    assert_near(scaled, plain, rtol=2**-9, atol=2**-9)
    assert norms == pytest.approx(plain_norms, rel=2**-8)


def test_gradients_of_a_penalty_come_back_without_the_scale_and_in_fp32() -> None:
    d = critic()
    engine = Engine(d, adam(d), precision="fp16", scaler=LOW)
    with engine.window() as window:
        with window.forward():
            x = torch.randn(5, SIZE, requires_grad=True)
            (ours,) = window.grad(d(x), [x])
        (plain,) = torch.autograd.grad(d(x).sum(), [x])
        window.backward(ours.sum())
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, plain, rtol=2**-8, atol=2**-9)


def test_gradients_of_an_fp64_model_stay_fp64() -> None:
    d = critic().double()
    engine = Engine(d, adam(d), precision="fp32")
    x = torch.randn(5, SIZE, dtype=torch.float64, requires_grad=True)
    with engine.window() as window:
        (ours,) = window.grad(d(x), [x])
        window.backward(ours.sum())
    assert ours.dtype == torch.float64


def test_an_error_in_a_window_makes_no_update_and_leaves_no_gradient() -> None:
    model = tiny_model()
    optimizer = with_momentum(model)
    engine = Engine(model, optimizer, precision="bf16")
    before = state(model, optimizer)
    opened: list[Window] = []

    def body() -> None:
        with engine.window() as window:
            opened.append(window)
            with window.forward():
                loss = mean_loss(model, micro_batches(1)[0])
            window.backward(loss)
            raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        body()
    assert_bitwise(before, state(model, optimizer))
    assert all(p.grad is None for p in model.parameters())
    assert len(engine.ledger) == 0
    with pytest.raises(ValueError, match=r"is known after the window's `with` block has ended without an error\.$"):
        _ = opened[0].update


def test_a_window_without_a_backward_is_an_update_without_weight() -> None:
    model = tiny_model()
    engine = Engine(model, with_momentum(model), precision="fp32")
    with engine.window() as window:
        pass
    assert window.update.cause is Cause.NO_WEIGHT
    assert window.update.skipped_because == "no weight: the window has no backward"


def test_windows_of_two_engines_may_be_open_at_once() -> None:
    """The inner one's step must not be hidden from the outer one by weights that were cast before it."""
    ends = []
    for nested in (True, False):
        d, g = critic(), generator()
        for_d, for_g = Engine(d, adam(d), precision="bf16"), Engine(g, adam(g), precision="bf16")
        real, noise = real_and_noise(0, 0)

        def train_critic(engine: Engine = for_d, d: nn.Module = d, g: nn.Module = g, data: Any = (real, noise)) -> None:
            with engine.window() as window:
                with window.forward():
                    loss = critic_loss(d, g, *data)
                window.backward(loss)

        if not nested:
            train_critic()
        with for_g.window() as window:
            if nested:
                with window.forward():
                    generator_loss(d, g, noise)  # the critic's weights are cast for the outer window
                train_critic()
            with window.forward():
                loss = generator_loss(d, g, noise)
            window.backward(loss)
        ends.append({**state(d), **{f"g {name}": value for name, value in state(g).items()}})
    assert_bitwise(*ends)
