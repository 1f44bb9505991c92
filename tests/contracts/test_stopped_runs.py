"""When a run cannot go on it stops with the cause, the place, the advice, and the batch to run again."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from halfstep import Engine
from halfstep.engine import Cause
from halfstep.errors import DataError, RunStopped, ScaleFloorReached, TooManySkips
from halfstep.precision.scaler import ScalerSettings
from parity.by_hand import Batch, as_if_on_a_device, assert_bitwise, mean_loss, micro_batches, state, tiny_model, weighted_loss

Loss = Callable[..., Any]
SHORT = ScalerSettings(init_scale=4.0, floor=1.0)
"""Two overflows are well, the third stops."""
LARGEST = "the largest weight is 1, in `1.weight`"


class Spoilt(torch.autograd.Function):
    """The identity, with a gradient that is not finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * math.inf


class Spoiler(nn.Module):
    """A layer with a broken backward."""

    def forward(self, x: Tensor) -> Tensor:
        return Spoilt.apply(x)


class Divider(nn.Module):
    """A layer with a broken forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 0


def with_layer(layer: nn.Module) -> nn.Module:
    first, norm, tanh, last = tiny_model()
    return nn.Sequential(first, norm, layer, tanh, last)


def stopped(model: nn.Module, folder: Path, *, loss: Loss = mean_loss, **given: Any) -> tuple[Engine, RunStopped]:
    """Train on two micro-batches until the run stops; `factor` spoils them, `on_host` is the path."""
    factor, on_host = given.pop("factor", 1.0), given.pop("on_host", True)
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=loss, evidence=folder, **given)
    engine = engine if on_host else as_if_on_a_device(engine)
    batches = [batch.times(factor) for batch in micro_batches(2)]
    with pytest.raises(RunStopped) as told:
        list(engine.updates([batches[0], batches[1]] * 100))
    return engine, told.value


def text(update: int, what: str, found: str, first: str, largest: str, folder: Path, advice: str) -> str:
    saved = f"the batch was saved as {folder / f'update-{update}-rank-0.pt'}"
    return f"Stopped at update {update}: {what} ({found}); {first}; {largest}; {saved}. {advice}"


FLOOR = "the loss scale fell below its floor of 1"
FIRST = "the first value that is not finite is"


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_floor_names_the_module_whose_forward_is_not_finite(tmp_path: Path, on_host: bool) -> None:
    engine, error = stopped(with_layer(Divider()), tmp_path, precision="fp16", scaler=SHORT, accumulate=2, on_host=on_host)
    assert isinstance(error, ScaleFloorReached)
    assert engine.ledger.causes() == {"calibration": 3}
    assert str(error) == text(
        3,
        FLOOR,
        "calibration",
        f"{FIRST} in the forward of `2` (Divider), in micro-batch 1",
        LARGEST,
        tmp_path,
        "No scale makes the gradients finite: train in bf16 or fp32, or mend that module.",
    )


def test_floor_names_the_module_whose_backward_is_not_finite(tmp_path: Path) -> None:
    _, error = stopped(with_layer(Spoiler()), tmp_path, precision="fp16", scaler=SHORT, accumulate=2)
    assert f"(calibration); {FIRST} in the backward of `2` (Spoiler), in micro-batch 1; " in str(error)


def test_floor_after_good_updates_advises_on_the_learning_rate(tmp_path: Path) -> None:
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, precision="fp16", scaler=SHORT, evidence=tmp_path)
    good, bad = micro_batches(2)
    engine.update([good])
    with pytest.raises(ScaleFloorReached) as told:
        list(engine.updates([bad.times(3e38)] * 3))
    assert "Stopped at update 4: the loss scale fell below its floor of 1 (overflow); " in str(told.value)
    assert str(told.value).endswith("Lower the learning rate, clip the norm, or train in bf16 or fp32.")


def test_a_gradient_that_overflows_in_the_loss_names_the_output_that_it_reaches(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return Spoilt.apply(mean_loss(model, batch))

    _, error = stopped(tiny_model(), tmp_path, precision="fp32", loss=loss, max_skips=2)
    assert f"{FIRST} in the gradient of the output of `3` (Linear), in micro-batch 1" in str(error)


def test_a_weight_gradient_that_overflows_alone_is_named(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return mean_loss(model, batch) + Spoilt.apply(model[0].weight).sum()

    _, error = stopped(tiny_model(), tmp_path, precision="fp32", loss=loss, max_skips=2)
    assert f"{FIRST} in the gradient of `0.weight`, in micro-batch 1" in str(error)


def test_an_activation_spoilt_between_modules_names_the_input_that_it_reaches(tmp_path: Path) -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x) * math.inf)

    _, error = stopped(Between(), tmp_path, precision="fp32", max_skips=2)
    assert f"{FIRST} in the input of `last` (Linear), in micro-batch 1" in str(error)


def test_a_loss_that_overflows_by_itself_is_named_as_such(tmp_path: Path) -> None:
    _, error = stopped(tiny_model(), tmp_path, precision="fp32", factor=math.inf, max_skips=2)
    assert str(error) == text(
        2,
        "skipped 2 updates in a row",
        "loss not finite: the loss is inf",
        f"{FIRST} in the loss, in micro-batch 1",
        LARGEST,
        tmp_path,
        "Look at that module's arithmetic (log or division by zero, a mask constant out of range).",
    )


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_a_scale_25_skips_in_a_row_stop_a_run(tmp_path: Path, precision: str, on_host: bool) -> None:
    engine, error = stopped(tiny_model(), tmp_path, precision=precision, factor=math.nan, on_host=on_host)
    assert isinstance(error, TooManySkips)
    assert str(error).startswith("Stopped at update 25: skipped 25 updates in a row (loss not finite: the loss is nan); ")
    assert len(engine.ledger.skips) == 25


def test_an_applied_update_ends_the_row(tmp_path: Path) -> None:
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, precision="fp32", max_skips=3, evidence=tmp_path)
    good, bad = micro_batches(2)
    list(engine.updates([bad.times(math.nan), bad.times(math.nan), good] * 4))
    assert (engine.ledger.applied, len(engine.ledger.skips)) == (4, 8)


def test_data_that_is_not_finite_names_the_sample(tmp_path: Path) -> None:
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, precision="fp32", max_skips=1, evidence=tmp_path)
    good, bad = micro_batches(2)
    bad.x[1, 0] = math.inf
    with pytest.raises(TooManySkips) as told:
        engine.update([good, bad])
    assert str(told.value) == text(
        1,
        "skipped 1 update",
        "data not finite: batch.x, sample 1 of micro-batch 2",
        f"{FIRST} in batch.x, sample 1 of micro-batch 2",
        LARGEST,
        tmp_path,
        "Mend or leave out that sample.",
    )


def test_weights_that_are_not_finite_are_lost(tmp_path: Path) -> None:
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, precision="fp32", max_skips=1, evidence=tmp_path)
    with torch.no_grad():
        model[0].bias[3] = -math.inf
    with pytest.raises(TooManySkips) as told:
        engine.update(micro_batches(1))
    assert str(told.value) == text(
        1,
        "skipped 1 update",
        "weights not finite: `0.bias`",
        f"{FIRST} in `0.bias`",
        "the largest weight is inf, in `0.bias`",
        tmp_path,
        "The weights are lost: start from the last good checkpoint, with a lower learning rate or clipping.",
    )


MASKED = (
    "Every label was masked in {}, so nothing could be learnt. "
    "Look at the ignore index, the truncation length and the prompt mask."
)


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_25_updates_whose_labels_are_all_masked_are_an_error_of_the_data(precision: str, on_host: bool) -> None:
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=weighted_loss, precision=precision)
    engine = engine if on_host else as_if_on_a_device(engine)
    masked = micro_batches(1, weights=[0.0, 0.0]) * 60
    with pytest.raises(DataError) as told:
        list(engine.updates(masked, epochs=None))
    assert str(told.value) == MASKED.format("25 updates in a row")
    assert len(engine.ledger) == 25


@pytest.mark.parametrize(("count", "said"), [(3, "3 updates in a row"), (1, "1 update")])
def test_a_short_epoch_whose_labels_are_all_masked_is_told_at_its_end(count: int, said: str) -> None:
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=weighted_loss, precision="fp32")
    with pytest.raises(DataError) as told:
        list(engine.updates(micro_batches(1, weights=[0.0, 0.0]) * count))
    assert str(told.value) == MASKED.format(said)


def test_an_epoch_with_one_label_is_no_error() -> None:
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=weighted_loss, precision="fp32")
    list(engine.updates(micro_batches(3, weights=[0.0, 0.0, 0.0, 0.0, 0.0, 1.0])))
    assert (engine.ledger.applied, engine.ledger.causes()) == (1, {"no weight": 2})
    with pytest.raises(DataError):
        list(engine.updates(micro_batches(2, weights=[0.0] * 4)))


def test_evidence_loads_and_shows_the_fault_again(tmp_path: Path) -> None:
    """With torch's safe loader: numbers, text and tensors only."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean() * batch["factor"]

    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=loss, precision="bf16", max_skips=1, evidence=tmp_path)
    bad = {"x": torch.randn(2, 4), "y": torch.randn(2, 2), "factor": torch.tensor(3e38)}
    bad["y"] *= 100
    with pytest.raises(TooManySkips):
        engine.update([bad])
    kept = torch.load(tmp_path / "update-1-rank-0.pt", weights_only=True)
    assert kept["precision"] == "bf16"
    assert kept["entry"]["cause"] == "loss not finite"
    assert all(torch.equal(kept["batches"][0][name], tensor) for name, tensor in bad.items())
    again = Engine(model, SGD(model.parameters(), lr=0.1), loss=loss, precision=kept["precision"])
    assert again.update(kept["batches"]).cause is Cause.LOSS


class Unpicklable:
    """A batch that holds a function."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.function = batch, lambda: None


def test_a_batch_that_cannot_be_saved_does_not_hide_why_the_run_stops(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Unpicklable) -> Tensor:
        return mean_loss(model, batch.batch)

    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=loss, precision="fp32", max_skips=1, evidence=tmp_path)
    with pytest.raises(TooManySkips, match=r"the batch could not be saved \(Can't pickle .*\)\. Look at that module's"):
        engine.update([Unpicklable(micro_batches(1)[0].times(math.inf))])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_does_not_hide_why_the_run_stops(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _, error = stopped(tiny_model(), tmp_path / "file" / "folder", precision="fp32", factor=math.inf, max_skips=1)
    assert "the batch could not be saved ([Errno 20] Not a directory" in str(error)


def test_a_batch_that_fails_when_run_again_does_not_hide_why_the_run_stops(tmp_path: Path) -> None:
    calls = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        calls.append(batch)
        if len(calls) > 1:
            raise RuntimeError("no second time")
        return mean_loss(model, batch)

    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=loss, precision="fp32", max_skips=1, evidence=tmp_path)
    with pytest.raises(TooManySkips) as told:
        engine.update([micro_batches(1)[0].times(math.inf)])
    assert f"{FIRST} unknown, since running the micro-batches again failed (RuntimeError: no second time); " in str(told.value)


def test_a_window_of_the_callers_own_is_stopped_without_a_place(tmp_path: Path) -> None:
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), precision="fp32", max_skips=1, evidence=tmp_path)

    def body() -> None:
        with engine.window() as window:
            window.backward(mean_loss(model, micro_batches(1)[0]) * math.inf)

    with pytest.raises(TooManySkips) as told:
        body()
    assert f"{FIRST} unknown, since the engine has no loss function to run again; " in str(told.value)


def test_looking_for_the_place_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    """Running statistics, hooks, modes and random states."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
    looks: list[torch.Tensor] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        total = mean_loss(model, batch) * math.inf
        looks.append(model[1].running_mean.clone())
        return total

    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=loss, precision="fp32", max_skips=1, evidence=tmp_path)
    with pytest.raises(TooManySkips):
        engine.update(micro_batches(1, size=4))
    assert len(looks) == 2, "the update, and the look"
    assert torch.equal(model[1].running_mean, looks[0])
    assert not torch.equal(looks[0], looks[1])
    assert all(not part._forward_hooks for part in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_a_stopped_run_leaves_parameters_as_they_were(tmp_path: Path) -> None:
    model = with_layer(Divider())
    before = state(model)
    stopped(model, tmp_path, precision="fp16", scaler=SHORT)
    assert_bitwise(before, state(model))
