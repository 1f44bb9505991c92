"""What a loss function may return, and the sentence for everything else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from halfstep.engine.loss import check_total, sum_and_weight
from halfstep.errors import ModelError

SHAPES = "a loss function returns a scalar tensor, or a tuple of the summed loss and its weight"
COUNTS = "a weight counts tokens or samples: 0 or more, and finite"


def scalar(value: float = 3.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype, requires_grad=True)


def test_a_scalar_is_a_mean_of_weight_one() -> None:
    total, weight = sum_and_weight(scalar())
    assert (total.item(), weight) == (3.0, 1.0)


def test_a_mean_over_a_part_of_a_micro_batch_counts_for_its_share() -> None:
    total, weight = sum_and_weight(scalar(), share=0.25)
    assert (total.item(), weight) == (0.75, 0.25)


def test_a_sum_over_a_part_brings_its_own_weight() -> None:
    total, weight = sum_and_weight((scalar(), 5), share=0.25)
    assert (total.item(), weight) == (3.0, 5.0)


@pytest.mark.parametrize("weight", [7, 7.0, torch.tensor(7), torch.tensor([7.0]), torch.tensor([[7]])])
def test_a_weight_is_a_number_or_a_tensor_of_one_element(weight: Any) -> None:
    _, counted = sum_and_weight((scalar(), weight))
    assert float(counted) == 7.0
    if isinstance(counted, torch.Tensor):
        assert (counted.dtype, counted.dim()) == (torch.float32, 0)


def test_a_weight_carries_no_gradient() -> None:
    _, weight = sum_and_weight((scalar(), scalar()))
    assert not weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_in_half_precision_becomes_fp32_before_it_is_scaled(dtype: torch.dtype) -> None:
    assert sum_and_weight(scalar(dtype=dtype))[0].dtype == torch.float32


def test_an_fp64_loss_stays_fp64() -> None:
    assert sum_and_weight(scalar(dtype=torch.float64))[0].dtype == torch.float64


def test_a_loss_of_shape_one_is_a_scalar() -> None:
    assert sum_and_weight(scalar().reshape(1, 1))[0].dim() == 0


BAD: list[tuple[Any, str]] = [
    (None, f"The loss function returned NoneType; {SHAPES}."),
    (3.0, f"The loss function returned float; {SHAPES}."),
    ({"loss": scalar()}, f"The loss function returned dict; {SHAPES}."),
    ((scalar(),), f"The loss function returned a tuple of (Tensor); {SHAPES}."),
    ((3, scalar()), f"The loss function returned a tuple of (int, Tensor); {SHAPES}."),
    ((scalar(), 1, 2), f"The loss function returned a tuple of (Tensor, int, int); {SHAPES}."),
    (
        torch.ones(2, 3, requires_grad=True),
        "The loss has shape (2, 3); reduce it to a scalar with `.sum()` or `.mean()`.",
    ),
    (
        torch.tensor(3.0),
        "The loss does not depend on any parameter that needs gradients; look for `torch.no_grad`, `.detach()`, `.item()` or "
        "frozen parameters on the way from the model to the loss.",
    ),
    ((scalar(), -1), f"The loss function returned the weight -1; {COUNTS}."),
    ((scalar(), math.nan), f"The loss function returned the weight nan; {COUNTS}."),
    ((scalar(), math.inf), f"The loss function returned the weight inf; {COUNTS}."),
    ((scalar(), None), "The loss function returned a weight of NoneType; the weight is a number or a scalar tensor."),
    ((scalar(), torch.ones(3)), "The loss function returned a weight of shape (3,); the weight is a number or a scalar tensor."),
]


@pytest.mark.parametrize(("result", "said"), BAD, ids=[said[:60] for _, said in BAD])
def test_anything_else_is_refused_with_a_sentence(result: Any, said: str) -> None:
    with pytest.raises(ModelError) as told:
        sum_and_weight(result)
    assert str(told.value) == said


@pytest.mark.parametrize(("total", "said"), [(-3.0, "-3"), (math.inf, "inf")])
def test_weights_that_add_up_to_no_count_are_refused(total: float, said: str) -> None:
    with pytest.raises(ModelError) as told:
        check_total(total)
    assert str(told.value) == f"The weights of a window add up to {said}; {COUNTS}."


@pytest.mark.parametrize("total", [0.0, 1e9, math.nan])
def test_a_weight_that_is_not_a_number_is_left_to_skip_its_update(total: float) -> None:
    check_total(total)
