"""What torch does, where guides and forums say otherwise: the facts that the engine is built on.

If one of these fails with a new torch, the engine may be simpler or must change.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW

from parity.by_hand import assert_bitwise, cut, mean_loss, micro_batches, samples, state, tiny_model


def test_fp16_loses_what_is_smaller_than_half_its_smallest_number() -> None:
    """Not "below 6e-5 becomes 0": between that and 6e-8 precision is lost, and at 2^-25 it rounds to 0."""
    smallest_normal, smallest = 2.0**-14, 2.0**-24
    assert torch.finfo(torch.float16).tiny == smallest_normal == pytest.approx(6.10e-5, rel=1e-3)
    halved = torch.tensor([smallest, smallest / 2, smallest / 2 * 1.001, 6e-8]).half().float().tolist()
    assert halved == [smallest, 0.0, smallest, smallest]


def test_grad_scaler_has_no_floor_and_lets_infinities_into_the_weights() -> None:
    """144 overflows from its start the reciprocal of the scale is infinite, and the next finite update writes infinities."""
    line = nn.Linear(1, 1, bias=False)
    optimizer = SGD(line.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    for _ in range(144):
        scaler.scale(line.weight.sum() * math.inf).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**-128
    scaler.scale(line.weight.sum()).backward()
    scaler.step(optimizer)
    assert not line.weight.isfinite().all()


@pytest.mark.parametrize(("fused", "called"), [(True, 1), (False, 0)])
def test_a_fused_optimizer_is_called_in_an_update_that_its_kernel_skips(fused: bool, called: int) -> None:
    """So "was step() called?" is the wrong question for a scheduler."""
    line = nn.Linear(1, 1)
    optimizer = AdamW(line.parameters(), fused=fused)
    calls: list[None] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(None))
    before = state(line)
    scaler = GradScaler("cpu")
    scaler.scale(line(torch.ones(1, 1)).sum() * math.inf).backward()
    scaler.step(optimizer)
    assert len(calls) == called
    assert_bitwise(before, state(line))


def test_fused_sgd_makes_momentum_of_uninitialised_memory_in_a_step_that_it_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    """`empty_like` is called before the kernel looks at the flag; a value put there instead shows that it is kept."""
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **given: torch.full_like(tensor, 1e30))
    line = nn.Linear(1, 1, bias=False)
    optimizer = SGD(line.parameters(), lr=0.1, momentum=0.9, fused=True)
    scaler = GradScaler("cpu")
    scaler.scale(line.weight.sum() * math.inf).backward()
    scaler.step(optimizer)
    assert optimizer.state[line.weight]["momentum_buffer"].item() == pytest.approx(1e30)


def test_a_step_inside_an_open_autocast_leaves_stale_weights() -> None:
    line = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        line.weight.fill_(1.0)
    optimizer = SGD(line.parameters(), lr=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        line(torch.ones(1, 1)).float().sum().backward()
        optimizer.step()
        stale = line(torch.ones(1, 1)).item()
    with torch.autocast("cpu", torch.bfloat16):
        fresh = line(torch.ones(1, 1)).item()
    assert (stale, fresh) == (1.0, 0.5)


def test_clearing_gradients_in_every_micro_batch_leaves_the_last_alone() -> None:
    """The guide's loop: what was accumulated is erased, and the rest divided by the whole number."""
    model, plain = tiny_model(), tiny_model()
    batches = micro_batches(4)
    for batch in batches:
        model.zero_grad()
        (mean_loss(model, batch) / 4).backward()
    (mean_loss(plain, batches[-1]) / 4).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_clipping_scaled_gradients_shrinks_the_update_by_orders_of_magnitude() -> None:
    model = tiny_model()
    (mean_loss(model, micro_batches(1)[0]) * 2.0**16).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    assert norm > 2.0**12, "the scale is in the norm"
    unscaled = math.hypot(*(p.grad.norm().item() / 2.0**16 for p in model.parameters()))
    assert unscaled < 2.0**-12


def test_a_mean_of_means_is_not_the_mean_over_ragged_counts() -> None:
    whole = samples(5)
    small, large = cut(whole, [1, 4])
    model = tiny_model()
    of_means = (mean_loss(model, small) + mean_loss(model, large)) / 2
    assert abs(of_means.item() - mean_loss(model, whole).item()) > 0.05 * mean_loss(model, whole).item()


def test_stepping_where_the_index_divides_steps_after_1_n_n() -> None:
    def windows(steps: list[int]) -> list[int]:
        return [b - a for a, b in zip([-1, *steps], steps, strict=False)]

    assert windows([i for i in range(12) if i % 4 == 0]) == [1, 4, 4]
    assert windows([i for i in range(12) if (i + 1) % 4 == 0]) == [4, 4, 4]


def test_bf16_parameters_pass_grad_scaler_unnoticed_and_fp16_ones_do_not() -> None:
    for dtype, passes in ((torch.bfloat16, True), (torch.float16, False)):
        line = nn.Linear(1, 1, bias=False).to(dtype)
        optimizer = SGD(line.parameters(), lr=0.1)
        scaler = GradScaler("cpu", init_scale=2.0)
        scaler.scale(line.weight.float().sum()).backward()
        if passes:
            scaler.unscale_(optimizer)
        else:
            with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
                scaler.unscale_(optimizer)
