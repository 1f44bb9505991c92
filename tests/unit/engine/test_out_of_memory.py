"""When memory runs out, micro-batches are computed in halves from then on, and the update is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from halfstep import Engine
from halfstep.engine.halving import is_out_of_memory, next_parts, parts_of
from halfstep.errors import DeviceError
from parity.by_hand import Batch, assert_near, cut, mean_loss, micro_batches, samples, state, tiny_model, weighted_loss

FP32_ROUNDING = 2e-6
Loss = Callable[[nn.Module, Batch], Any]


class Memory:
    """A loss that runs out of memory above so many samples, after its forward or before it."""

    def __init__(self, loss: Loss, *, fits: int) -> None:
        self.loss, self.fits = loss, fits
        self.sizes: list[int] = []

    def __call__(self, model: nn.Module, batch: Batch) -> Any:
        self.sizes.append(len(batch.x))
        if len(batch.x) > self.fits:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return self.loss(model, batch)


def trained(loss: Loss, windows: list[list[Batch]], **given: Any) -> tuple[Engine, dict[str, Any], list[Any]]:
    model = tiny_model()
    optimizer = AdamW(model.parameters(), lr=0.01)
    engine = Engine(model, optimizer, loss=loss, precision="fp32", **given)
    updates = [engine.update(window) for window in windows]
    return engine, state(model, optimizer), updates


@settings(max_examples=20)
@given(size=st.integers(2, 9), fits=st.integers(1, 8), by_weight=st.booleans())
def test_halved_micro_batches_give_the_update_of_whole_ones(size: int, fits: int, by_weight: bool) -> None:
    loss: Loss = weighted_loss if by_weight else mean_loss
    windows = [micro_batches(2, size), micro_batches(1, size, seed=5)]
    _, whole, plain = trained(loss, windows)
    engine, halved, updates = trained(Memory(loss, fits=fits), windows)
    assert_near(halved, whole, rtol=1e-4, atol=FP32_ROUNDING)
    assert [u.loss for u in updates] == pytest.approx([u.loss for u in plain], rel=FP32_ROUNDING)
    assert [u.grad_norm for u in updates] == pytest.approx([u.grad_norm for u in plain], rel=1e-5)
    assert engine.counters.samples == 3 * size


def test_the_size_is_remembered_and_told() -> None:
    memory = Memory(mean_loss, fits=2)
    windows = [micro_batches(2, 8), micro_batches(2, 8)]
    engine, _, _ = trained(memory, windows)
    assert memory.sizes == [8, 4, *[2] * 8, *[2] * 8], "once 8, once 4, then twos"
    assert str(engine.choices["micro_batch_parts"]) == (
        "4 (memory ran out with larger micro-batches; the weights keep the result the same)"
    )
    assert engine.state_dict()["micro_batch_parts"] == 4


def test_while_memory_suffices_that_is_told_too() -> None:
    engine, _, _ = trained(mean_loss, [micro_batches(1)])
    assert str(engine.choices["micro_batch_parts"]) == "1 (micro-batches fit as the loader gives them)"


def test_what_was_accumulated_before_memory_ran_out_is_not_counted_twice() -> None:
    """The first micro-batch fits, the second does not: the window is begun anew."""
    window = cut(samples(9, weights=[1, 2, 1, 1, 3, 1, 1, 1, 2]), [3, 6])
    _, whole, _ = trained(weighted_loss, [window])
    engine, halved, updates = trained(Memory(weighted_loss, fits=4), [window])
    assert_near(halved, whole, rtol=1e-4, atol=FP32_ROUNDING)
    assert updates[0].weight == 13.0
    assert (updates[0].micro_batches, engine.counters.samples) == (4, 9)


def test_a_window_from_a_loader_is_redone_from_the_inputs_that_were_read() -> None:
    memory = Memory(mean_loss, fits=1)
    model, plain = tiny_model(), tiny_model()
    batches = micro_batches(5)
    for_loader = Engine(model, SGD(model.parameters(), lr=0.1), loss=memory, precision="fp32", accumulate=3)
    list(for_loader.updates(iter(batches)))
    list(Engine(plain, SGD(plain.parameters(), lr=0.1), loss=mean_loss, precision="fp32", accumulate=3).updates(batches))
    assert_near(state(model), state(plain), rtol=FP32_ROUNDING, atol=FP32_ROUNDING)


def test_memory_that_runs_out_in_backward_is_the_same() -> None:
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
            ctx.size = size
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            if ctx.size > 2:
                raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
            return gradient, None

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return Backward.apply(mean_loss(model, batch), len(batch.x))

    windows = [micro_batches(2, 4)]
    _, whole, _ = trained(mean_loss, windows)
    _, halved, _ = trained(loss, windows)
    assert_near(halved, whole, rtol=1e-4, atol=FP32_ROUNDING)


def test_one_sample_that_does_not_fit_is_a_sentence() -> None:
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=Memory(mean_loss, fits=0), precision="fp32")
    with pytest.raises(DeviceError) as told:
        engine.update(micro_batches(1, 4))
    assert str(told.value) == (
        "Out of memory with micro-batches of one sample (4 split in 4). Use a smaller model, shorter samples, "
        "`checkpoint_activations=True`, or a lower precision."
    )
    assert not torch.is_autocast_enabled("cpu")


def test_without_halving_it_is_a_sentence() -> None:
    model = tiny_model()
    memory = Memory(mean_loss, fits=2)
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=memory, precision="fp32", halve_on_out_of_memory=False)
    with pytest.raises(DeviceError) as told:
        engine.update(micro_batches(1, 4))
    assert str(told.value) == ("Out of memory in a micro-batch, and `halve_on_out_of_memory` is off. Use smaller micro-batches.")
    assert memory.sizes == [4]


def test_other_errors_of_the_loss_reach_the_caller() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    model = tiny_model()
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied$"):
        Engine(model, SGD(model.parameters(), lr=0.1), loss=loss, precision="fp32").update(micro_batches(1))


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: 8 bytes"), True),
        (RuntimeError("expected scalar type Half"), False),
        (MemoryError(), False),
    ],
)
def test_which_errors_mean_that_memory_ran_out(error: BaseException, verdict: bool) -> None:
    assert is_out_of_memory(error) is verdict


@given(size=st.integers(1, 40), parts=st.sampled_from([1, 2, 4, 8, 16]))
def test_shares_of_the_parts_add_up_to_the_whole(size: int, parts: int) -> None:
    shares = [share for _, share in parts_of(torch.zeros(size, 2), parts)]
    assert sum(shares) == pytest.approx(1.0)
    assert len(shares) == min(size, parts)


def test_parts_double_until_they_are_single_samples() -> None:
    batches = [torch.zeros(5), torch.zeros(3)]
    assert [next_parts(batches, parts) for parts in (1, 2, 4)] == [2, 4, 8]
    with pytest.raises(DeviceError, match=r"^Out of memory with micro-batches of one sample \(5 split in 8\)\."):
        next_parts(batches, 8)
