"""How an engine comes by its precision, and what autocast is open when."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from halfstep import Engine
from halfstep.config.choice import Choice
from halfstep.config.options import Precision
from halfstep.errors import ModelError
from halfstep.precision.scaler import ScalerSettings
from parity.by_hand import Batch, ByHand, assert_bitwise, mean_loss, micro_batches, state, tiny_model

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
OUTSIDE = (
    "The engine is used inside a `torch.autocast` context, whose cached weights would be stale after the step. "
    "Leave that context; the engine opens its own, as `precision` says."
)


def test_auto_measures_on_the_first_micro_batch_and_keeps_its_reason() -> None:
    model, plain = tiny_model(), tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss)
    assert "precision" not in engine.choices
    engine.update(micro_batches(1))
    choice = engine.choices["precision"]
    assert choice.value in set(Precision) - {Precision.BF16_PURE}
    assert len(choice.reason) > 20
    loop = ByHand(model=plain, optimizers=[SGD(plain.parameters(), lr=0.1)], mean=True, dtype=HALF.get(choice.value))
    loop.update(micro_batches(1))
    assert_bitwise(state(model), state(plain))
    assert engine.counters.micro_batches == 1, "measuring counts for nothing"


def test_auto_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def choose(*_: object) -> Choice[Precision]:
        asked.append(1)
        return Choice(value=Precision.BF16, reason="a test says so")

    monkeypatch.setattr("halfstep.engine.arithmetic.select_precision", choose)
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, accumulate=2)
    list(engine.updates(micro_batches(6)))
    assert asked == [1]
    assert str(engine.choices["precision"]) == "bf16 (a test says so)"


def test_what_was_asked_for_is_said_so() -> None:
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), precision=Precision.BF16)
    assert str(engine.choices["precision"]) == "bf16 (asked for)"


def seen_by(precision: str) -> list[torch.dtype]:
    """The dtype of a matmul in the loss, between forwards, and in evaluation."""
    model = tiny_model()
    a = torch.randn(2, 2)
    seen: list[torch.dtype] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        seen.append((a @ a).dtype)
        return mean_loss(model, batch)

    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=loss, precision=precision)

    def lazily() -> object:
        for batch in micro_batches(2):
            seen.append((a @ a).dtype)
            yield batch

    engine.update(lazily())
    with engine.autocast():
        seen.append((a @ a).dtype)
    seen.append((a @ a).dtype)
    return seen


@pytest.mark.parametrize("precision", HALF)
def test_autocast_is_open_in_the_loss_and_in_evaluation_and_nowhere_else(precision: str) -> None:
    half, full = HALF[precision], torch.float32
    assert seen_by(precision) == [full, full, half, half, half, full]


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_without_autocast_nothing_is_cast(precision: str) -> None:
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), precision=precision)
    a = torch.randn(2, 2)
    with engine.window() as window:
        with window.forward():
            assert (a @ a).dtype == torch.float32
        window.backward(model(torch.randn(2, 4, dtype=next(model.parameters()).dtype)).float().sum())
    with engine.autocast():
        assert (a @ a).dtype == torch.float32


@pytest.mark.parametrize("precision", HALF)
def test_weights_are_cast_anew_in_every_window(precision: str) -> None:
    """A forward in the second window sees the weights that the first one's step made."""
    line = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        line.weight.fill_(1.0)
    seen: list[float] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        seen.append(out.item())
        return out.float().sum()

    low = ScalerSettings(init_scale=2.0**10)
    engine = Engine(line, SGD(line.parameters(), lr=0.25), loss=loss, precision=precision, accumulate=2, scaler=low)
    list(engine.updates([torch.ones(1, 1)] * 6))
    assert seen == [1.0, 1.0, 0.75, 0.75, 0.5, 0.5]


def casts_and_end(*, window_wide: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, object]]:
    monkeypatch.setattr("halfstep.precision.policy.CAST_CACHE_SURVIVES_NO_GRAD", window_wide)
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, precision="bf16", accumulate=4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        list(engine.updates(micro_batches(4)))
    return next(event.count for event in profile.key_averages() if event.key == "aten::_to_copy"), state(model)


def test_each_weight_is_cast_once_a_window_and_not_once_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of torch cast once a micro-batch; the gradients are bitwise the same."""
    once, ours = casts_and_end(window_wide=True, monkeypatch=monkeypatch)
    each, theirs = casts_and_end(window_wide=False, monkeypatch=monkeypatch)
    weights_of_linear_layers = 4
    assert each - once >= 3 * weights_of_linear_layers
    assert_bitwise(ours, theirs)


@pytest.mark.parametrize("precision", HALF)
def test_a_forward_without_gradients_in_a_window_takes_none_from_the_others(precision: str) -> None:
    """Before torch 2.13 the cached cast of such a forward had no gradient to give."""
    ends = []
    for looks in (True, False):
        model = tiny_model()
        engine = Engine(model, SGD(model.parameters(), lr=0.1), precision=precision)
        with engine.window() as window:
            for batch in micro_batches(2):
                if looks:
                    with torch.no_grad(), window.forward():
                        mean_loss(model, batch)
                with window.forward():
                    loss = mean_loss(model, batch)
                window.backward(loss)
        assert window.update.grad_norm > 0
        ends.append(state(model))
    assert_bitwise(*ends)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-pure"])
def test_an_autocast_of_the_callers_own_around_an_update_is_refused(precision: str) -> None:
    """fp32 would run in the caller's dtype; weights cast before the step would be used after it."""
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, precision=precision)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ModelError) as told:
        engine.update(micro_batches(1))
    assert str(told.value) == OUTSIDE
    with engine.autocast(), torch.autocast("cpu", enabled=False):
        engine.update([Batch(x=b.x.to(model[0].weight.dtype), y=b.y, weight=b.weight) for b in micro_batches(1)])


@pytest.mark.parametrize("precision", HALF)
def test_evaluation_between_updates_changes_nothing(precision: str) -> None:
    ends = []
    for evaluates in (True, False):
        model = tiny_model()
        engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, precision=precision, accumulate=2)
        for _ in engine.updates(micro_batches(6)):
            if evaluates:
                with torch.no_grad(), engine.autocast():
                    mean_loss(model, micro_batches(1, seed=9)[0])
        ends.append(state(model))
    assert_bitwise(*ends)


@pytest.mark.parametrize("precision", HALF)
def test_no_autocast_is_left_open_by_an_error(precision: str) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        raise KeyError("labels")

    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=loss, precision=precision)
    with pytest.raises(KeyError):
        engine.update(micro_batches(1))
    assert not torch.is_autocast_enabled("cpu")
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_scales_of_updates_are_told() -> None:
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, precision="fp16", accumulate=1)
    batches = [micro_batches(1)[0].times(math.inf), *micro_batches(1)]
    assert [update.scale for update in engine.updates(batches)] == [2.0**16, 2.0**15]
