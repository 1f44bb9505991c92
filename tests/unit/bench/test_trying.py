"""A trial measures what was asked of it: not a smaller micro-batch in its place, and not only short samples."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from halfstep.bench.trying import Task, _longest_first, attempt
from halfstep.config.load import load
from halfstep.train.build import build_engine, shape_of
from halfstep.train.job import prepare
from halfstep.train.padded import Padded

OWN = """
import torch

calls = []

def build():
    return torch.nn.Linear(2, 1)

def loss(model, batch):
    (inputs,) = batch
    calls.append(len(inputs))
    if len(inputs) > {most} and len(calls) > {calls}:
        raise torch.OutOfMemoryError("no memory for so many")
    return model(inputs).square().sum(), len(inputs)

def data():
    return torch.utils.data.TensorDataset(torch.ones(40, 2))
"""
TEXTS = """
[model]
architecture = "gpt2"
config = { n_embd = 8, n_layer = 1, n_head = 1 }
[data]
files = "texts.jsonl"
packing = false
sequence_length = 64
[batch]
global = 2
micro = 1
"""


def own(place: Path, name: str, *, most: int, calls: int) -> list[str]:
    """Settings of a run whose loss has no memory for more than `most` samples after so many calls."""
    (place / f"{name}.py").write_text(OWN.format(most=most, calls=calls))
    parts = {"model.factory": "build", "model.loss": "loss", "data.factory": "data"}
    return [*(f'{key}="{name}:{part}"' for key, part in parts.items()), "batch.global=4", "batch.micro=4", "precision=fp32"]


def test_micro_batches_that_were_halved_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def failed(name: str, *, most: int, calls: int) -> str | None:
        settings = own(tmp_path, name, most=most, calls=calls)
        return attempt(Task(config=None, settings=settings, updates=1, limit_s=60)).failed

    assert failed("short_in_training", most=2, calls=1) == (
        "does not fit: out of memory with micro-batches of 4, until they were halved"
    )
    assert failed("short_at_once", most=2, calls=0) == "does not fit: out of memory"
    assert failed("ample", most=4, calls=0) is None


def test_the_longest_samples_come_first_whatever_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.toml").write_text(TEXTS)
    texts = ["a" * length for length in [4] * 300 + [40, 50, 60]]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    job = prepare(load(tmp_path / "texts.toml", ["precision=fp32"]), started=datetime.now())
    engine, _ = build_engine(job.model, job.resolved, None, job.opened.train)
    _longest_first(engine, job)
    engine.settle()
    samples = job.opened.train.samples(shape_of(job.run))
    assert isinstance(samples, Padded)
    longest = sorted(samples.lengths.tolist())[-2:]
    assert min(longest) > 10
    assert engine.counters.weight == sum(longest) - 2  # all tokens but the first of each are predicted
