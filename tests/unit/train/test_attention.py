"""Attention by matmuls is attention: the same values and gradients as torch's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.train.attention import matmul_attention
from halfstep.train.models import config_of_architecture, new_model

HEADS, LENGTH, WIDTH = 4, 6, 8


def values(heads: int = HEADS) -> Tensor:
    return torch.randn(2, heads, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)


def ours(*given: Any, groups: int = 1, causal: bool = True, **more: Any) -> Tensor:
    layer: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=causal)
    return matmul_attention(layer, *given, **more)[0]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_values_and_gradients_are_those_of_torch(causal: bool, groups: int) -> None:
    torch.manual_seed(0)
    inputs = values(), values(HEADS // groups), values(HEADS // groups)
    expected = F.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=groups > 1).transpose(1, 2)
    found = ours(*inputs, None, groups=groups, causal=causal)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    gradients = [torch.autograd.grad((each * weights).sum(), inputs) for each in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_a_mask_of_truths_and_one_of_numbers_hide_the_same_tokens() -> None:
    torch.manual_seed(0)
    inputs, seen = (values(), values(), values()), torch.rand(2, 1, LENGTH, LENGTH) < 0.7
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=seen).transpose(1, 2)
    numbers = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    torch.testing.assert_close(ours(*inputs, seen), expected)
    torch.testing.assert_close(ours(*inputs, numbers), expected)


def test_a_token_that_sees_none_is_no_nan_in_bf16() -> None:
    query, key, value = (values().detach().bfloat16() for _ in range(3))
    hidden = torch.full((2, 1, LENGTH, LENGTH), torch.finfo(torch.float32).min)
    assert ours(query, key, value, hidden).isfinite().all()


def test_scaling_is_the_one_that_is_asked_for() -> None:
    inputs = values(), values(), values()
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.5).transpose(1, 2)
    torch.testing.assert_close(ours(*inputs, None, scaling=0.5), expected)


def test_what_it_cannot_do_is_left_to_transformers() -> None:
    with pytest.raises(ValueError, match="`sdpa` attention does not support `softcap`"):
        ours(values(), values(), values(), None, softcap=30.0)


def test_the_name_of_the_attention_is_not_saved_with_the_model() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    model: Any = new_model(config_of_architecture("llama", {**sizes, "num_key_value_heads": 1}), "matmul")
    assert model.config._attn_implementation == "halfstep-matmul"
    assert "halfstep" not in model.config.to_json_string()
