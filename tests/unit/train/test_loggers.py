"""Services that follow a run, with modules written by hand in the place of their libraries."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from halfstep.config.options import LoggerName
from halfstep.engine import Entry
from halfstep.errors import UsageError
from halfstep.train.loggers import following, require
from halfstep.train.record import EvaluationRecord, UpdateRecord

SETTINGS = {"precision": "fp32", "batch": {"global": 8}}


class FakeMLflow(ModuleType):
    """What of MLflow's module is used, keeping what it was told."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__("mlflow")
        self.told: list[Any] = []
        self.broken = broken

    def start_run(self, run_name: str) -> None:
        self.told.append(("start", run_name))

    def log_params(self, params: dict[str, Any]) -> None:
        self.told.append(("params", params))

    def log_metrics(self, metrics: dict[str, float], step: int, synchronous: bool) -> None:
        if self.broken:
            raise ConnectionError("the server is away\nand more")
        self.told.append((step, metrics, synchronous))

    def flush_async_logging(self) -> None:
        self.told.append("flush")

    def end_run(self, status: str) -> None:
        self.told.append(("end", status))


class FakeWandB(ModuleType):
    """What of W&B's module is used; the run it begins is itself."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.told: list[Any] = []

    def init(self, **keywords: Any) -> FakeWandB:
        self.told.append(keywords)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.told.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.told.append(("end", exit_code))


def update() -> UpdateRecord:
    entry = Entry(index=3, applied=True, cause=None, detail="", loss=1.5, grad_norm=2.0, scale=1.0, weight=10.0, micro_batches=1)
    return UpdateRecord(entry=entry, applied=3, done=0.5, lr=0.1, seconds=0.5, elapsed_s=1.0, memory_bytes=None)


UPDATE = {
    "train/loss": 1.5,
    "train/grad_norm": 2.0,
    "train/loss_scale": 1.0,
    "train/learning_rate": 0.1,
    "speed/tokens_per_s": 20.0,
}
EVALUATION = {"evaluation/loss": 1.0, "evaluation/nats_per_byte": 0.5, "evaluation/perplexity": 2.7}


def evaluation() -> EvaluationRecord:
    return EvaluationRecord(update=3, loss=1.0, nats_per_byte=0.5, perplexity=2.7, seconds=0.1, best=True)


def test_mlflow_hears_of_the_run_its_numbers_and_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    with following([LoggerName.MLFLOW], tmp_path / "first", SETTINGS, pytest.fail) as [follower]:
        follower.on_update(update())
        follower.on_evaluation(evaluation())
        follower.close()
    assert fake.told == [
        ("start", "first"),
        ("params", {"precision": "fp32", "batch.global": 8}),
        (3, UPDATE, False),
        (3, EVALUATION, False),
        "flush",
        ("end", "FINISHED"),
    ]


def test_wandb_hears_of_the_run_its_numbers_and_that_it_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)

    def fail() -> None:
        with following([LoggerName.WANDB], tmp_path / "first", SETTINGS, pytest.fail) as [follower]:
            follower.on_update(update())
            raise KeyError("a fault of the run")

    with pytest.raises(KeyError):
        fail()
    begun = {"name": "first", "dir": str(tmp_path / "first"), "config": SETTINGS}
    assert fake.told == [begun, (3, UPDATE), ("end", 1)]


def test_a_service_that_fails_is_said_once_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake, said = FakeMLflow(broken=True), []
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    with following([LoggerName.MLFLOW], tmp_path, SETTINGS, said.append) as [follower]:
        follower.on_update(update())
        follower.on_update(update())
    assert said == ["mlflow failed and is told no more: the server is away. The run goes on, with its own log."]
    assert len(fake.told) == 2


def test_a_service_that_begins_no_run_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeWandB()
    fake.init = lambda **_: (_ for _ in ()).throw(ValueError("no API key.\nLog in first"))  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(UsageError) as caught, following([LoggerName.WANDB], tmp_path, {}, pytest.fail):
        pytest.fail("the run began")
    assert str(caught.value) == '`run.loggers` names "wandb", which begins no run: no API key.'


@pytest.mark.parametrize("name", list(LoggerName))
def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, name: LoggerName) -> None:
    monkeypatch.setitem(sys.modules, str(name), None)
    with pytest.raises(UsageError) as caught:
        require([name])
    assert str(caught.value) == f'`run.loggers` names "{name}", which is not installed: pip install {name}.'
