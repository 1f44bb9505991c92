"""Held-out losses, the best of them, and the folder that keeps the models."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from halfstep.config.options import Metric
from halfstep.distributed import Group, World
from halfstep.train.evaluate import HeldOut, evaluate
from halfstep.train.judge import Judge
from halfstep.train.loss import WholeLogits
from halfstep.train.windows import Windows

TOKENS = (np.arange(30) * 7 % 11).astype(np.uint8)


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Constant(nn.Module):
    """The same logits everywhere: with `sharpness` 0 every token costs log(11)."""

    def __init__(self) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.zeros(()))
        self.dropout = nn.Dropout(0.9)

    def forward(self, input_ids: Tensor) -> Output:
        logits = self.sharpness * torch.arange(11.0)
        return Output(self.dropout(logits).expand(*input_ids.shape, 11))


def held_out() -> HeldOut:
    windows = Windows(TOKENS, 6)
    return HeldOut(
        batches=[windows.__getitems__([index]) for index in range(len(windows))],
        bytes_per_token=2.0,
        device=torch.device("cpu"),
        look=WholeLogits(),
        metric=Metric.PERPLEXITY,
        autocast=nullcontext,
        group=Group(World()),
    )


def test_the_loss_is_a_mean_over_tokens_and_over_bytes() -> None:
    found = Judge(Constant(), held_out(), every=1, keep=None).look(1)
    assert found.loss == pytest.approx(math.log(11), rel=1e-6)
    assert found.nats_per_byte == pytest.approx(math.log(11) / 2, rel=1e-6)
    assert found.perplexity == pytest.approx(11, rel=1e-6)
    assert found.accuracy is None


def test_evaluation_switches_dropout_off_and_leaves_training_on() -> None:
    model = Constant().train()
    with torch.no_grad():
        model.sharpness.fill_(0.1)
    assert evaluate(model, held_out()).loss == evaluate(model, held_out()).loss
    assert model.training


def test_the_best_model_is_kept_when_it_is_found() -> None:
    model, kept = Constant(), []
    judge = Judge(model, held_out(), every=2, keep=lambda: kept.append(model.sharpness.item()))
    for update, sharpness in ((2, -3.0), (4, 0.0), (6, -2.0)):
        with torch.no_grad():
            model.sharpness.fill_(sharpness)
        judge.look(update)
    assert kept == [-3.0, 0.0]
    assert judge.best is not None
    assert (judge.best.update, judge.best.best) == (4, True)
    assert judge.last is not None
    assert (judge.last.update, judge.last.best) == (6, False)


def test_a_loss_that_is_no_number_is_never_the_best() -> None:
    model, kept = Constant(), []
    judge = Judge(model, held_out(), every=1, keep=lambda: kept.append(model.sharpness.item()))
    for update, sharpness in ((1, float("nan")), (2, 0.0), (3, float("nan"))):
        with torch.no_grad():
            model.sharpness.fill_(sharpness)
        judge.look(update)
    assert judge.best is not None
    assert judge.best.update == 2
    assert kept == [0.0]


def of_classes(*looks: tuple[float, float]) -> HeldOut:
    """Data of ten samples on which the model has these losses and so many right, look by look."""
    found = iter(looks)

    def look(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss, right = next(found)
        return torch.tensor(10 * loss), torch.tensor(10), torch.tensor(right)

    return replace(held_out(), batches=[torch.zeros(10)], bytes_per_token=None, look=look, metric=Metric.ACCURACY)


def test_the_best_classifier_has_the_most_right_and_of_equals_the_least_loss() -> None:
    judge = Judge(Constant(), of_classes((0.5, 6), (0.4, 5), (0.6, 7), (0.55, 7), (0.7, 7)), every=1, keep=None)
    assert [judge.look(update).best for update in range(1, 6)] == [True, False, True, True, False]
    assert judge.best is not None
    assert (judge.best.update, judge.best.accuracy, judge.best.perplexity, judge.best.nats_per_byte) == (4, 0.7, None, None)


def test_a_text_is_looked_at_every_so_many_updates_and_at_the_end() -> None:
    judge = Judge(Constant(), held_out(), every=3, keep=None)
    assert [update for update in range(1, 8) if judge.is_due(update)] == [3, 6]
    judge.look(6)
    assert not judge.is_due_at_end(6)
    assert judge.is_due_at_end(7)


@pytest.mark.parametrize("every", [0, 5])
def test_without_text_or_wish_nothing_is_ever_due(every: int) -> None:
    judge = Judge(Constant(), held_out() if every == 0 else None, every=every, keep=None)
    assert not judge.is_due(5)
    assert not judge.is_due_at_end(7)
