"""What becomes of an epoch's last, shorter window: stepped, carried into the next epoch, or dropped."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD

from halfstep import Engine
from halfstep.engine import Update
from halfstep.errors import DataError
from parity.by_hand import Batch, ByHand, assert_bitwise, assert_near, in_windows, micro_batches, state, tiny_model, weighted_loss

FP32_ROUNDING = 2e-6


def windows_by_hand(batches: Sequence[Batch], size: int, epochs: int, tail: str) -> list[Sequence[Batch]]:
    """The windows that each choice means, written out."""
    if tail == "carry":
        return list(in_windows(list(batches) * epochs, size))
    each = list(in_windows(batches, size))
    return (each if tail == "step" else [window for window in each if len(window) == size]) * epochs


def trained(batches: Sequence[Batch], size: int, epochs: int, tail: str) -> tuple[Engine, list[Update], dict[str, object]]:
    model = tiny_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = Engine(model, optimizer, loss=weighted_loss, precision="fp32", accumulate=size, tail=tail)
    return engine, list(engine.updates(batches, epochs=epochs)), state(model, optimizer)


@settings(max_examples=30)
@given(count=st.integers(1, 9), size=st.integers(1, 5), epochs=st.integers(1, 3), tail=st.sampled_from(["step", "carry", "drop"]))
def test_each_tail_is_the_loop_by_hand_over_its_windows(count: int, size: int, epochs: int, tail: str) -> None:
    batches = micro_batches(count, weights=[float(1 + i % 3) for i in range(2 * count)])
    windows = windows_by_hand(batches, size, epochs, tail)
    if not windows:
        with pytest.raises(DataError):
            trained(batches, size, epochs, tail)
        return
    engine, updates, ours = trained(batches, size, epochs, tail)
    model = tiny_model()
    loop = ByHand(model=model, optimizers=[SGD(model.parameters(), lr=0.1, momentum=0.9)])
    for window in windows:
        loop.update(window)
    assert [update.micro_batches for update in updates] == [len(window) for window in windows]
    assert [update.weight for update in updates] == [sum(b.weight.sum().item() for b in window) for window in windows]
    assert_near(ours, state(model, *loop.optimizers), rtol=FP32_ROUNDING, atol=FP32_ROUNDING)
    assert engine.counters.samples == 2 * sum(len(window) for window in windows)


def test_the_tail_is_divided_by_its_own_weight() -> None:
    """Peers divide a last window of one micro-batch by the full window's four."""
    batches = micro_batches(5)
    _, _, ours = trained(batches, 4, 1, "step")
    model = tiny_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    loop = ByHand(model=model, optimizers=[optimizer])
    loop.update(batches[:4])
    loop.update(batches[4:])
    assert_bitwise(ours, state(model, optimizer))


def test_a_dropped_tail_does_not_leak_into_the_next_epoch() -> None:
    batches = micro_batches(6)
    model = tiny_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    loop = ByHand(model=model, optimizers=[optimizer])
    for _ in range(2):
        loop.update(batches[:4])
    assert_bitwise(trained(batches, 4, 2, "drop")[2], state(model, optimizer))


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        ("step", "a shorter last window of an epoch is an update of its own, exactly weighted"),
        ("carry", "asked for: an epoch's last micro-batches begin the next epoch's first window"),
        ("drop", "asked for: an epoch's last micro-batches are not used unless they fill a window"),
    ],
)
def test_what_becomes_of_the_tail_is_said(tail: str, reason: str) -> None:
    engine, _, _ = trained(micro_batches(4), 4, 1, tail)
    assert str(engine.choices["tail"]) == f"{tail} ({reason})"


def test_dropping_everything_is_told() -> None:
    with pytest.raises(DataError) as told:
        trained(micro_batches(3), 4, 1, "drop")
    assert str(told.value) == (
        'The list yielded fewer than the 4 micro-batches of a window, and `tail = "drop"` leaves shorter ones out. '
        'Use "step" or "carry", or a smaller `accumulate`.'
    )


@pytest.mark.parametrize("epochs", [2, None])
def test_an_iterator_that_runs_dry_ends_a_carried_run_after_its_last_window(epochs: int | None) -> None:
    """It would be asked for micro-batches for ever."""
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=weighted_loss, precision="fp32", accumulate=2, tail="carry")
    updates = engine.updates(iter(micro_batches(3)), epochs=epochs)
    assert [next(updates).micro_batches, next(updates).micro_batches] == [2, 1]
    with pytest.raises(DataError, match=r"^The list_iterator yielded no micro-batch"):
        next(updates)
