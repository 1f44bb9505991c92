"""What "auto" takes on a GPU, and that it leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpu.models import adamw, flat, on_device, ragged, small_model
from halfstep import Engine
from halfstep.config.options import Precision
from halfstep.precision.select import candidates, select_precision

pytestmark = pytest.mark.gpu


def test_auto_takes_a_candidate_and_says_what_it_measured(device: torch.device) -> None:
    model = small_model(device)
    engine = Engine(model, adamw(model), loss=on_device)
    assert engine.update(ragged(device, 2)).applied or engine.ledger.skips[0].scale > 1.0
    choice = engine.choices["precision"]
    assert choice.value in candidates(device)
    assert "forward and backward takes" in choice.reason
    assert " s" in choice.reason


def test_auto_takes_a_half_precision_for_large_products(device: torch.device) -> None:
    if candidates(device) == [Precision.FP32]:
        pytest.skip(f"{torch.cuda.get_device_name()} has no half precision of its own")
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).to(device)
    choice = select_precision(
        model, lambda called, x: called(x).float().square().mean(), torch.randn(4096, 2048).to(device), device
    )
    assert choice.value in (Precision.BF16, Precision.FP16), choice.reason
    assert "times as fast as fp32" in choice.reason


def test_auto_leaves_weights_gradients_and_random_states(device: torch.device) -> None:
    model = small_model(device)
    before, host, gpu = flat(model), torch.get_rng_state(), torch.cuda.get_rng_state(device)
    select_precision(model, on_device, ragged(device, 1)[0], device, budget_s=0.2)
    assert torch.equal(flat(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), host)
    assert torch.equal(torch.cuda.get_rng_state(device), gpu)
