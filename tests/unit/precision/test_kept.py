"""The precision of a run, kept for the next one of the same weights and data."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from halfstep.config.choice import Choice
from halfstep.config.options import Precision
from halfstep.precision.kept import kept_precision, key_of
from halfstep.precision.select import select_precision
from halfstep.precision.trial import Trial

CPU = torch.device("cpu")
Batch = dict[str, Tensor]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))


def batch() -> Batch:
    return {"x": torch.ones(4, 8), "y": torch.arange(4)}


def mean_square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).square().mean()


def trials_of(bf16_seconds: tuple[float, ...]) -> Callable[..., dict[Precision, Trial]]:
    exact = Trial(precision=Precision.FP32, seconds=(1.0, 1.0, 1.0), losses=(1.0,))
    half = Trial(precision=Precision.BF16, seconds=bf16_seconds, losses=(1.0,))
    return lambda *_, **__: {Precision.FP32: exact, Precision.BF16: half}


def chosen(monkeypatch: pytest.MonkeyPatch, bf16_seconds: tuple[float, ...]) -> Choice[Precision]:
    monkeypatch.setattr("halfstep.precision.select.candidates", lambda device: [Precision.FP32, Precision.BF16])
    monkeypatch.setattr("halfstep.precision.select.run_trials", trials_of(bf16_seconds))
    return select_precision(network(), mean_square, batch(), CPU, key="key")


def test_what_left_no_doubt_is_kept_with_its_date(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = chosen(monkeypatch, (0.5, 0.5, 0.5))
    kept = kept_precision("key")
    assert choice.value is Precision.BF16
    assert kept == Choice(
        value=Precision.BF16, reason=f"{choice.reason}; measured on {date.today()}, on the same weights and data"
    )


def test_what_left_a_doubt_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen(monkeypatch, (0.5, 0.99, 0.5))
    assert kept_precision("key") is None


@pytest.mark.parametrize(
    "text", ["", "[]", '{"precision": "fp31", "reason": "", "measured": "2026-11-30"}', '{"precision": "bf16"}']
)
def test_a_damaged_file_is_measured_again(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen(monkeypatch, (0.5, 0.5, 0.5))
    (file,) = tmp_path.rglob("key.json")
    file.write_text(text)
    assert kept_precision("key") is None


def test_another_weight_batch_loss_or_trained_part_has_another_key() -> None:
    def key(model: nn.Module, batch: Batch, loss: str = "loss") -> str:
        return key_of(model, batch, loss, CPU)

    other = network()
    with torch.no_grad():
        other[0].weight[0, 0] += 1e-6
    frozen = network()
    frozen[0].requires_grad_(False)
    moved = network()
    moved[1].running_mean[0] = 1e-6
    keys = [
        key(network(), batch()),
        key(network().double(), batch()),
        key(other, batch()),
        key(frozen, batch()),
        key(moved, batch()),
        key(network(), batch() | {"y": torch.arange(1, 5)}),
        key(network(), batch(), "smoothed"),
    ]
    assert len({*keys}) == len(keys)
    assert key(network(), batch()) == keys[0]
