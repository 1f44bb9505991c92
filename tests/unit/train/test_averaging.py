"""Averaged weights are those of the formula, move on applied updates only."""

from __future__ import annotations

import torch
from torch import nn

from halfstep import Engine
from halfstep.train.averaging import averaged


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


def test_the_average_of_bf16_weights_is_fp32() -> None:
    model = nn.Linear(2, 1)
    average = averaged(model, 0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return module(batch.bfloat16()).float().square().mean()

    engine = Engine(model, optimizer, loss=loss, precision="bf16-pure", ema=average)
    seen = []
    for _ in range(2):
        engine.update([torch.randn(4, 2)])
        engine.settle()
        seen.append(model.weight.detach().float())
    torch.testing.assert_close(average.module.weight.detach(), 0.9 * seen[0] + 0.1 * seen[1])
    assert model.weight.dtype is torch.bfloat16
