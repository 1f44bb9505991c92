"""However samples are split, an update is that of the whole.

Compared with the closed form in FP64; 1e-12 is the rounding of a few dozen sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

from halfstep import Engine
from halfstep.engine import Cause
from parity.by_hand import Batch, ByHand, assert_bitwise, cut, in_windows, samples, state, tiny_model, weighted_loss

ROUNDING = 1e-12

Counts = st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0, 7.0, 0.25]), min_size=1, max_size=12)


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    """Weights of some samples, and the sizes of the micro-batches that they come in."""
    weights = draw(Counts)
    cuts = draw(st.sets(st.integers(1, max(1, len(weights) - 1)), max_size=len(weights)))
    bounds = [0, *sorted(c for c in cuts if c < len(weights)), len(weights)]
    return weights, [b - a for a, b in pairwise(bounds)]


def gradients(model: nn.Module, whole: Batch) -> list[Tensor]:
    """In closed form: the gradient of the weighted mean over all samples at once."""
    total, weight = weighted_loss(model, whole)
    return list(torch.autograd.grad(total / weight, list(model.parameters())))


def moved_by(model: nn.Module, batches: Sequence[Batch], **given: object) -> tuple[list[Tensor], object]:
    """How one update at learning rate 1 moves the parameters: the gradient itself."""
    before = [p.detach().clone() for p in model.parameters()]
    engine = Engine(model, SGD(model.parameters(), lr=1.0), loss=weighted_loss, precision="fp32", **given)
    update = engine.update(batches)
    return [a - p.detach() for a, p in zip(before, model.parameters(), strict=True)], update


@settings(max_examples=60)
@given(split=splits())
def test_any_split_into_micro_batches_gives_the_gradient_of_the_whole(split: tuple[list[float], list[int]]) -> None:
    weights, sizes = split
    model, whole = tiny_model(torch.float64), samples(len(weights), weights=weights, dtype=torch.float64)
    if not sum(weights):
        moved, update = moved_by(model, cut(whole, sizes))
        assert update.cause is Cause.NO_WEIGHT
        assert all(not step.any() for step in moved)
        return
    expected = gradients(model, whole)
    moved, update = moved_by(model, cut(whole, sizes))
    for step, gradient in zip(moved, expected, strict=True):
        torch.testing.assert_close(step, gradient, rtol=ROUNDING, atol=ROUNDING)
    assert update.weight == sum(weights)
    assert update.micro_batches == len(sizes)


@settings(max_examples=30)
@given(split=splits())
def test_loss_and_norm_of_an_update_are_those_of_the_whole(split: tuple[list[float], list[int]]) -> None:
    weights, sizes = split
    if not sum(weights):
        return
    model, whole = tiny_model(torch.float64), samples(len(weights), weights=weights, dtype=torch.float64)
    total, weight = weighted_loss(model, whole)
    norm = torch.stack([g.norm() for g in gradients(model, whole)]).norm()
    _, update = moved_by(model, cut(whole, sizes))
    assert update.loss == pytest.approx((total / weight).item(), rel=ROUNDING)
    assert update.grad_norm == pytest.approx(norm.item(), rel=ROUNDING)


@settings(max_examples=30)
@given(split=splits(), accumulate=st.integers(1, 5), epochs=st.integers(1, 2))
def test_any_windows_of_a_loader_are_the_loop_by_hand(split: tuple[list[float], list[int]], accumulate: int, epochs: int) -> None:
    weights, sizes = split
    batches = cut(samples(len(weights), weights=[w + 1 for w in weights], dtype=torch.float64), sizes)
    ours, theirs = tiny_model(torch.float64), tiny_model(torch.float64)
    engine = Engine(ours, SGD(ours.parameters(), lr=0.1), loss=weighted_loss, precision="fp32", accumulate=accumulate)
    done = list(engine.updates(batches, epochs=epochs))
    loop = ByHand(model=theirs, optimizers=[SGD(theirs.parameters(), lr=0.1)])
    windows = [window for _ in range(epochs) for window in in_windows(batches, accumulate)]
    for window in windows:
        loop.update(window)
    assert [update.micro_batches for update in done] == [len(window) for window in windows]
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=ROUNDING, atol=ROUNDING)


def test_one_window_of_four_is_four_windows_of_one_at_the_same_weights() -> None:
    """1 x 4 = 4 x 1: the mean of four micro-batches' gradients is the gradient of one window of all four."""
    model, batches = tiny_model(torch.float64), cut(samples(8, dtype=torch.float64), [2, 2, 2, 2])
    apart = [gradients(model, batch) for batch in batches]
    moved, _ = moved_by(model, batches)
    for step, each in zip(moved, zip(*apart, strict=True), strict=True):
        torch.testing.assert_close(step, torch.stack(each).mean(dim=0), rtol=ROUNDING, atol=ROUNDING)


def test_token_weights_are_not_a_mean_of_means() -> None:
    """The example of the facts: micro-batches of 1 and 4 tokens with gradients 1 and 2 make 1.8, where a mean of means is 1.5."""
    line = nn.Linear(1, 1, bias=False).double()
    before = line.weight.item()
    engine = Engine(line, SGD(line.parameters(), lr=1.0), loss=slope_times_tokens, precision="fp32")
    engine.update([(1.0, 1), (2.0, 4)])
    assert before - line.weight.item() == pytest.approx(1.8, rel=ROUNDING)


def slope_times_tokens(model: nn.Module, batch: tuple[float, int]) -> tuple[Tensor, int]:
    slope, tokens = batch
    return model.weight.sum() * slope * tokens, tokens


def test_a_mean_counts_as_one_micro_batch_whatever_its_size() -> None:
    """A bare scalar is the classic accumulation: the sum of the means over their number, also in a shorter last window."""
    line = nn.Linear(1, 1, bias=False).double()
    engine = Engine(line, SGD(line.parameters(), lr=1.0), loss=slope, precision="fp32", accumulate=2)
    before = line.weight.item()
    moves = []
    for _ in engine.updates([1.0, 2.0, 6.0]):
        moves.append(before - line.weight.item())
        before = line.weight.item()
    assert moves == pytest.approx([1.5, 6.0], rel=ROUNDING)


def slope(model: nn.Module, batch: float) -> Tensor:
    return model.weight.sum() * batch


def test_weights_as_host_numbers_and_as_tensors_give_the_same_bits() -> None:
    def with_host_weight(model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        total, weight = weighted_loss(model, batch)
        return total, weight.item()

    ends = []
    for loss in (weighted_loss, with_host_weight):
        model = tiny_model()
        engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=loss, precision="fp32", accumulate=3)
        list(engine.updates(cut(samples(6, weights=[1, 0, 3, 2, 0, 0]), [2, 1, 3])))
        ends.append(state(model))
    assert_bitwise(*ends)


def test_micro_batches_may_come_from_a_generator() -> None:
    batches = cut(samples(6), [2, 2, 2])

    def lazily() -> Iterator[Batch]:
        yield from batches

    ends = []
    for window in (batches, lazily()):
        model = tiny_model()
        Engine(model, SGD(model.parameters(), lr=0.1), loss=weighted_loss, precision="fp32").update(window)
        ends.append(state(model))
    assert_bitwise(*ends)
