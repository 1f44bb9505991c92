"""The folder of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import LlamaConfig, LlamaForCausalLM

from halfstep.config.facts import DataFacts, Facts, MachineFacts, ModelFacts
from halfstep.config.inputs import Tokenizers, resolve_inputs
from halfstep.config.load import load
from halfstep.config.resolve import resolve
from halfstep.config.run import Resolved
from halfstep.errors import ConfigError, UsageError
from halfstep.train.folder import RunFolder
from halfstep.train.record import EvaluationRecord
from halfstep.train.summary import Ending, Summary


def resolved() -> Resolved:
    written = load(None, ["precision=fp32"])
    facts = Facts(
        machine=MachineFacts(device="cpu", device_name="a CPU", cores=1, memory_bytes=None, world_size=1),
        model=ModelFacts(parameters=1, hidden=1, layers=1, vocabulary=256, context=None),
        data=DataFacts(
            text_bytes=10**6,
            train_tokens=10**6,
            train_files=1,
            evaluation_tokens=10,
            evaluation_bytes=10,
            held_out="some",
        ),
        started=datetime(2026, 1, 2),
    )
    inputs = resolve_inputs(written, Tokenizers(exists=lambda folder: False, size=lambda folder: 0))
    return resolve(written, inputs, facts)


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config)


SUMMARY = Summary(
    ending=Ending.FINISHED,
    because="it did",
    planned_updates=4,
    applied_updates=4,
    skipped={},
    tokens=4,
    wall_s=1.0,
    rate=None,
    final=EvaluationRecord(update=4, loss=1.0, seconds=1.0, best=False),
    best=EvaluationRecord(update=2, loss=0.9, seconds=1.0, best=True),
    train_loss=1.0,
    unigram_nats_per_byte=3.0,
    peak_memory_bytes=None,
)


def status(folder: RunFolder) -> str:
    return str(json.loads((folder.path / "run.json").read_text())["status"])


def test_a_folder_says_that_its_run_is_running_until_it_has_ended(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "deep" / "run", resolved())
    assert status(folder) == "running"
    folder.finish(SUMMARY, {})
    assert status(folder) == "finished"


def test_a_failure_is_noted_and_goes_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", resolved())
    with pytest.raises(ZeroDivisionError), folder.failures_noted():
        print(1 / 0)
    assert status(folder) == "failed"
    assert json.loads((folder.path / "run.json").read_text())["error"] == "division by zero"


def test_two_runs_cannot_have_one_folder(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "run", resolved())
    before = (first.path / "run.json").read_bytes()
    with pytest.raises(ConfigError):
        RunFolder(tmp_path / "run", resolved())
    assert (first.path / "run.json").read_bytes() == before


def test_a_saved_model_is_the_model_bitwise(tmp_path: Path) -> None:
    saved = RunFolder(tmp_path / "run", resolved()).save_model("model", original := model(), None)
    again = LlamaForCausalLM.from_pretrained(saved)
    for name, parameter in original.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter), name


def test_the_best_model_stays_unless_it_is_the_last(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", resolved())
    folder.save_model("best", model(), None)
    folder.finish(SUMMARY, {})
    assert (folder.path / "best").is_dir()
    folder.finish(replace(SUMMARY, best=SUMMARY.final), {})
    assert not (folder.path / "best").exists()


def test_a_writer_of_weights_that_finds_the_disk_full_leaves_the_model_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run", resolved())
    folder.save_model("model", model(), None)
    before = sorted(path.name for path in (folder.path / "model").iterdir())

    def full(self: LlamaForCausalLM, path: str, **given: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(UsageError) as error:
        folder.save_model("model", model(), None)
    assert str(error.value) == (f"{folder.path}/model cannot be written: the disk is full. What was saved before is still there.")
    assert sorted(path.name for path in (folder.path / "model").iterdir()) == before
