"""Averaged weights are those of the formula, move on applied updates only, and give the model back as it was."""

from __future__ import annotations

import torch
from torch import nn

from halfstep import Engine
from halfstep.train.averaging import automatic_decay, averaged, averaged_weights


def test_the_average_is_that_of_the_formula_over_applied_updates() -> None:
    model = nn.Linear(2, 1)
    average = averaged(model, 0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, optimizer, loss=lambda m, batch: m(batch).square().mean(), precision="fp32", ema=average)
    expected: torch.Tensor | None = None
    for number, batch in enumerate((torch.randn(4, 2), torch.full((4, 2), torch.inf), torch.randn(4, 2), torch.randn(4, 2))):
        engine.update([batch])
        engine.settle()
        if number != 1:  # the second update is skipped
            weight = model.weight.detach().clone()
            expected = weight if expected is None else 0.9 * expected + 0.1 * weight
    assert expected is not None
    assert int(average.n_averaged) == 3
    torch.testing.assert_close(average.module.weight.detach(), expected)


def test_the_models_own_weights_come_back_bitwise() -> None:
    model = nn.Linear(3, 3)
    average = averaged(model, 0.5)
    with torch.no_grad():
        average.update_parameters(model)
        model.weight.mul_(3)
    own = model.weight.detach().clone()
    with averaged_weights(model, average):
        torch.testing.assert_close(model.weight, own / 3)
    assert torch.equal(model.weight, own)


def test_before_the_first_update_the_models_weights_are_used() -> None:
    model = nn.Linear(3, 3)
    average = averaged(model, 0.5)
    with torch.no_grad():
        model.weight.fill_(7)
    with averaged_weights(model, average):
        assert bool((model.weight == 7).all())


def test_the_decay_fits_the_length_of_the_run() -> None:
    assert str(automatic_decay(1000)) == "0.99 (about the last 100 of 1,000 updates)"
    assert automatic_decay(10**7).value == 0.9999
    assert automatic_decay(None).value == 0.999
