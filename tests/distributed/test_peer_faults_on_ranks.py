"""Faults that other stacks have on several ranks, in numbers that one can check by head: the engine has none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from distributed.conftest import Both
from halfstep import Engine


class Slope(nn.Module):
    """One weight; the gradient of its output is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def summed(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    return model(tokens).sum(), len(tokens)


def gradients(tokens: Sequence[Sequence[Sequence[float]]], given: dict[str, Any]) -> tuple[list[float], int]:
    """The gradient of each update of an epoch, by how far SGD at a rate of 1 goes; and how often the scheduler stepped.

    Args:
        tokens: of each rank, its micro-batches.
        given: what the engine is given besides.
    """
    model = Slope()
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=100)
    engine = Engine(model, optimizer, loss=summed, scheduler=scheduler, precision="fp32", **given)
    before, steps = 0.0, []
    for _ in engine.updates([torch.tensor(each) for each in tokens[dist.get_rank()]]):
        steps.append(before - model.weight.item())
        before = model.weight.item()
    return steps, scheduler.last_epoch


@pytest.mark.parametrize("given", [{}, {"find_unused_parameters": True}], ids=str)
def test_tokens_count_alike_on_whichever_rank_they_are(both: Both, given: dict[str, Any]) -> None:
    """A mean of the ranks' means would be (1 + 2) / 2 = 1.5; of all five tokens it is 1.8."""
    one, four = [1.0], [2.0, 2.0, 2.0, 2.0]
    for steps, _ in both(gradients, [[one] * 4, [four] * 4], given):
        assert steps == pytest.approx([1.8] * 4)


def test_a_tail_is_divided_by_what_is_in_it_over_all_ranks(both: Both) -> None:
    """Three micro-batches here, two there, and four to a window: neither divided by 4 nor by 2 ranks of 4."""
    parts = [[[6.0], [0.0], [3.0]], [[2.0, 2.0], [5.0]]]
    for steps, _ in both(gradients, parts, {"accumulate": 4}):
        assert steps == pytest.approx([18 / 6])


def test_the_tail_of_one_rank_alone_is_an_update_of_all(both: Both) -> None:
    parts = [[[1.0], [2.0], [3.0], [4.0], [9.0]], [[1.0], [2.0], [3.0], [4.0]]]
    for steps, _ in both(gradients, parts, {"accumulate": 2}):
        assert steps == pytest.approx([1.5, 3.5, 9.0])


def test_the_scheduler_steps_once_an_update_and_not_once_a_process(both: Both) -> None:
    for steps, scheduler_steps in both(gradients, [[[1.0]] * 6, [[1.0]] * 6], {"accumulate": 2}):
        assert len(steps) == scheduler_steps == 3


def test_what_was_accumulated_is_clipped_after_it_was_reduced(both: Both) -> None:
    """Each rank's own gradient is 6 and 0, the true one 3: clipped to 2 it is 2, not the mean of 2 and 0."""
    for steps, _ in both(gradients, [[[6.0]] * 4, [[0.0]] * 4], {"clip_norm": 2.0}):
        assert steps == pytest.approx([2.0] * 4, rel=1e-6)


def losses_and_norms(tokens: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    model = Slope()
    nn.init.ones_(model.weight)
    engine = Engine(model, SGD(model.parameters(), lr=0.0), loss=summed, precision="fp32")
    updates = [engine.update([torch.tensor(tokens[dist.get_rank()])] * 2) for _ in range(4)]
    return [(update.loss, update.grad_norm) for update in updates]


def test_loss_and_norm_are_those_of_all_ranks_and_not_divided_by_accumulation(both: Both) -> None:
    for told in both(losses_and_norms, [[1.0], [2.0, 2.0, 2.0, 2.0]]):
        assert told == [pytest.approx((1.8, 1.8))] * 4
