"""What people expect of a trainer, through the real command: the same numbers whichever way they are made."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from train_command import Train


def configuration(place: Path, folder: str = "run") -> str:
    return (place / folder / "config.toml").read_text(encoding="utf-8")


def losses(place: Path, folder: str = "run") -> list[float]:
    log = map(json.loads, (place / folder / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [entry["loss"] for entry in log if entry["kind"] == "update"]


def test_activations_that_are_computed_again_give_the_same_run(place: Path, train: Train) -> None:
    words = ("model.config.num_hidden_layers=2", "evaluation.every_updates=0")
    assert train(*words).code == 0
    assert train(*words, "model.checkpoint_activations=true", "run.folder=again").code == 0
    assert losses(place) == losses(place, "again")


def compile_without_kernels(module: nn.Module) -> None:
    """What `nn.Module.compile` does, with graphs of forward and backward that torch's own kernels run: seconds, not minutes."""
    module._compiled_call_impl = torch.compile(module._call_impl, backend="aot_eager")


@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor:UserWarning")  # torch's compiler looks at it itself
def test_compiled_blocks_give_the_same_run_to_rounding(place: Path, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", compile_without_kernels)
    words = ("evaluation.every_updates=0", "model.config.num_hidden_layers=2", "limits.updates=3", "model.loss_chunk=16")
    assert train(*words).code == 0
    assert train(*words, "model.compile=true", "run.folder=compiled").code == 0
    assert losses(place, "compiled") == pytest.approx(losses(place), rel=1e-5)
    assert "compile = true  # asked for: 2 x LlamaDecoderLayer, compiled in " in configuration(place, "compiled")


def test_a_compiler_that_fails_is_one_sentence(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("No working C++ compiler found.\nSet CXX")

    monkeypatch.setattr(nn.Module, "compile", lambda self: setattr(self, "_compiled_call_impl", fail))
    said = train("model.config.num_hidden_layers=2", "model.compile=true")
    assert said.code == 2
    assert said.err.splitlines()[-1] == (
        "halfstep: `model.compile = true` cannot be: No working C++ compiler found. Use false, or leave it out."
    )


def test_a_deterministic_run_repeats_bitwise(place: Path, train: Train) -> None:
    words = ("model.config.attention_dropout=0.1", "run.deterministic=true")
    assert train(*words).code == 0
    assert train(*words, "run.folder=again").code == 0
    assert losses(place) == losses(place, "again")
    assert "deterministic = true\n" in configuration(place)


def test_adafactor_trains_and_says_why_it_is_not_fused(place: Path, train: Train) -> None:
    assert train("optimizer.name=adafactor", "evaluation.every_updates=0").code == 0
    assert losses(place)[-1] < losses(place)[0]
    assert "# optimizer.fused: False (torch's Adafactor has no fused kernel)\n" in configuration(place)


def test_a_logger_that_is_not_installed_is_one_sentence(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    said = train("run.loggers=wandb")
    assert (said.code, said.err) == (
        2,
        'halfstep: `run.loggers` names "wandb", which is not installed: pip install wandb.\n',
    )


def test_a_logger_that_nobody_knows_is_answered_with_those_there_are(train: Train) -> None:
    said = train("run.loggers=comet")
    assert (said.code, said.err) == (
        2,
        'halfstep: `run.loggers = "comet"` is not right: it must be "mlflow", "wandb" or a list of both.\n',
    )


def test_batches_from_another_process_give_the_same_run(place: Path, train: Train) -> None:
    assert train("limits.updates=2").code == 0
    assert train("limits.updates=2", "data.workers=1", "run.folder=beside").code == 0
    assert losses(place) == losses(place, "beside")
    told = "# data.transfer: none (batches are made where they are used; one batch made ahead, by this process)\n"
    assert told in configuration(place)
