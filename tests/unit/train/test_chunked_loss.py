"""The chunked loss is the plain one, in value and in every gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from halfstep.errors import ModelError
from halfstep.train.chunked_loss import CHUNK_UNIT, chunk_tokens, linear_cross_entropy

Result = tuple[Tensor, list[Tensor | None]]
Loss = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype is torch.float64 else logits.float()
    return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)


def inputs(
    tokens: int = 11, width: int = 5, vocabulary: int = 13, *, bias: bool = True, ignored: float = 0.3, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    offset = torch.randn(vocabulary, dtype=dtype, requires_grad=True) if bias else None
    targets = torch.randint(0, vocabulary, (tokens,)).masked_fill(torch.rand(tokens) < ignored, -100)
    return hidden, weight, offset, targets


def result(loss: Loss, given: tuple[Tensor, Tensor, Tensor | None, Tensor], root: float = 1.0) -> Result:
    """The loss and the gradients of all that need one, with `root` as the gradient at the root."""
    leaves = [tensor for tensor in given[:3] if tensor is not None and tensor.requires_grad]
    for leaf in leaves:
        leaf.grad = None
    total = loss(*given)
    total.backward(torch.tensor(root, dtype=total.dtype))
    return total.detach(), [leaf.grad for leaf in leaves]


def assert_same(ours: Result, theirs: Result, *, relative: float) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=relative, atol=0)
    for mine, other in zip(ours[1], theirs[1], strict=True):
        assert mine is not None
        assert other is not None
        assert mine.dtype is other.dtype
        torch.testing.assert_close(mine, other, rtol=relative, atol=relative * float(other.abs().max()))


@given(
    seed=st.integers(0, 1000),
    tokens=st.integers(1, 40),
    vocabulary=st.integers(1, 50),
    at_once=st.integers(1, 45),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    bias=st.booleans(),
    root=st.sampled_from([1.0, -0.3, 65536.0]),
)
def test_value_and_gradients_are_those_of_the_plain_loss(
    seed: int, tokens: int, vocabulary: int, at_once: int, ignored: float, smoothing: float, bias: bool, root: float
) -> None:
    torch.manual_seed(seed)
    given = inputs(tokens, 4, vocabulary, bias=bias, ignored=ignored, dtype=torch.float64)
    ours = result(lambda *a: linear_cross_entropy(*a, tokens_at_once=at_once, label_smoothing=smoothing), given, root)
    theirs = result(lambda *a: plain(*a, smoothing=smoothing), given, root)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * abs(root))


def test_fp32_is_equal_to_rounding() -> None:
    given = inputs(100, 32, 200, dtype=torch.float32)
    assert_same(result(lambda *a: linear_cross_entropy(*a, tokens_at_once=7), given), result(plain, given), relative=2e-6)


@pytest.mark.parametrize(("dtype", "relative"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_under_autocast_it_is_equal_to_the_rounding_of_its_number_format(dtype: torch.dtype, relative: float) -> None:
    given = inputs(100, 32, 200, dtype=torch.float32)

    def under_autocast(loss: Loss) -> Loss:
        def run(*arguments: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=dtype):
                return loss(*arguments)

        return run

    ours = result(under_autocast(lambda *a: linear_cross_entropy(*a, tokens_at_once=16)), given, root=128.0)
    assert_same(ours, result(under_autocast(plain), given, root=128.0), relative=relative)


def test_autocast_that_is_still_open_in_backward_changes_nothing() -> None:
    given = inputs(30, 8, 20, dtype=torch.float32)
    closed = result(linear_cross_entropy, given)
    total = linear_cross_entropy(*given)
    leaves = [tensor for tensor in given[:3] if tensor is not None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        opened = torch.autograd.grad(total, leaves)
    assert all(torch.equal(a, b) for a, b in zip(opened, closed[1], strict=True) if b is not None)


def test_an_fp16_gradient_that_only_the_loss_scale_keeps_from_zero_is_kept() -> None:
    vocabulary = 4096
    hidden = torch.zeros(1, 2, dtype=torch.float32, requires_grad=True)
    weight = torch.zeros(vocabulary, 2, dtype=torch.float32)
    bias = torch.zeros(vocabulary, requires_grad=True)
    weight[:, 0] = torch.linspace(0, 2e-4, vocabulary)
    with torch.autocast("cpu", dtype=torch.float16):
        total = linear_cross_entropy(hidden, weight, bias, torch.tensor([0]), tokens_at_once=1)
    (scaled,) = torch.autograd.grad(total, [hidden], torch.tensor(2.0**14), retain_graph=True)
    (unscaled,) = torch.autograd.grad(total, [hidden], torch.tensor(2.0**-12))
    assert float(scaled[0, 0]) / 2**14 == pytest.approx(1e-4, rel=1e-2)
    assert float(unscaled[0, 0]) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_second_backward_through_a_kept_graph_gives_the_same(dtype: torch.dtype) -> None:
    given = inputs(20, 8, 30, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        total = linear_cross_entropy(*given, tokens_at_once=6)
    leaves = [tensor for tensor in given[:3] if tensor is not None]
    first = torch.autograd.grad(total, leaves, torch.tensor(3.0), retain_graph=True)
    second = torch.autograd.grad(total, leaves, torch.tensor(3.0))
    torch.testing.assert_close(first, second)


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_the_same() -> None:
    hidden, weight, bias, targets = inputs(dtype=torch.float64)
    _, (expected, *_) = result(plain, (hidden, weight, bias, targets))
    frozen = (hidden, weight.detach(), None if bias is None else bias.detach(), targets)
    _, gradients = result(lambda *a: linear_cross_entropy(*a, tokens_at_once=3), frozen)
    assert len(gradients) == 1
    torch.testing.assert_close(gradients[0], expected)


def test_without_gradients_the_value_is_the_same_and_no_graph_is_kept() -> None:
    given = inputs(dtype=torch.float32)
    with torch.no_grad():
        total = linear_cross_entropy(*given, tokens_at_once=4)
    assert not total.requires_grad
    torch.testing.assert_close(total, plain(*given).detach())


def test_pure_bf16_has_its_loss_in_fp32_and_its_gradients_in_bf16() -> None:
    given = inputs(50, 16, 40, dtype=torch.bfloat16)
    total, gradients = result(lambda *a: linear_cross_entropy(*a, tokens_at_once=8), given)
    assert total.dtype is torch.float32
    assert [gradient.dtype for gradient in gradients if gradient is not None] == [torch.bfloat16] * 3
    assert_same((total, gradients), result(plain, given), relative=2e-2)


def test_a_gradient_of_the_gradient_is_refused_and_not_wrong() -> None:
    hidden, weight, bias, targets = inputs(dtype=torch.float64)
    total = linear_cross_entropy(hidden, weight, bias, targets)
    with pytest.raises(ModelError) as error:
        torch.autograd.grad(total, [hidden], create_graph=True)
    assert str(error.value) == (
        "The chunked loss has no gradient of its gradient (`create_graph=True`). Use `model.loss_chunk = 0`."
    )


def test_chunks_are_whole_units_that_fit_their_size() -> None:
    assert chunk_tokens(32_000, torch.device("cpu")) == 512
    assert chunk_tokens(10**9, torch.device("cpu")) == CHUNK_UNIT
    assert chunk_tokens(128_256, torch.device("cuda")) == 512
