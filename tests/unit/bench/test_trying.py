"""A trial measures what was asked of it: not a smaller micro-batch in its place, and not only short samples."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
import torch

from halfstep.bench.trying import Task, _let_rise, _longest_first, attempt
from halfstep.config.load import load
from halfstep.engine import Engine
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


def test_a_rising_rate_goes_from_a_part_to_a_multiple_by_even_factors() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda applied: 1.0)
    engine = Engine(model, optimizer, scheduler=scheduler, loss=lambda module, batch: module(batch).mean(), precision="fp32")
    _let_rise(engine, 4.0, 5)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        engine.update([torch.ones(1, 2)])
    assert rates == pytest.approx([0.125, 0.25, 0.5, 1.0, 2.0])


def test_a_run_that_cannot_go_on_keeps_its_losses_in_a_range_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = [
        *own(tmp_path, "steep", most=4, calls=0),
        "optimizer.name=sgd",
        "optimizer.clip_norm=0",
        "optimizer.learning_rate=1e30",
    ]
    trial = attempt(Task(config=None, settings=settings, updates=40, limit_s=60, rise=30.0))
    assert trial.failed is None
    assert 0 < len(trial.losses) < 42


def test_a_profile_says_in_sentences_where_the_time_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = [*own(tmp_path, "profiled", most=4, calls=0)[:-1], "precision=bf16"]
    first, phases, *_ = attempt(Task(config=None, settings=settings, updates=6, limit_s=60, explain=True)).why
    assert first.startswith("large matrix products in bf16 run at ")
    assert first.endswith(" TFLOP/s")
    assert phases.startswith("an update of ")
    assert ", forward " in phases
