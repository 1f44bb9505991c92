"""`halfstep certify` as a command: every line of a certificate on a small model, in all its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.cli.main import main

FACTORY = """\
import torch
from torch import nn
from torch.nn import functional as F


def make():
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 3))
    return model, loss, [(torch.randn(3, 6), torch.randint(3, (3,))) for _ in range(4)]


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def one():
    return make()[0]


def short():
    model, loss, batches = make()
    return model, loss, [(x[:1], y[:1]) for x, y in batches]


def half():
    model, loss, batches = make()
    return model.half(), loss, batches


def frozen():
    model, loss, batches = make()
    return model.requires_grad_(False), loss, batches


def unfit():
    model, _, batches = make()
    return model, lambda model, batch: model(batch["x"]), batches


def words():
    model, loss, _ = make()
    return model, loss, ["a", "b"]


def bare():
    model, loss, batches = make()
    return model, loss, batches[0]
"""
NOT_ASKED = ["tf32", "zero3"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "certified_here.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("certified_here", None)


@pytest.mark.slow
def test_a_right_model_holds_every_claim_that_can_be_asked(place: Path) -> None:
    command = [sys.executable, "-m", "halfstep", "certify", "certified_here:make", "--format", "json", "--html", "page.html"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["holds"]
    assert [line["claim"].split(":")[0] for line in found["lines"] if line["holds"] is None] == NOT_ASKED
    assert sum(line["holds"] is True for line in found["lines"]) == 18
    assert "bitwise" in next(line["tolerance"] for line in found["lines"] if line["claim"].startswith("killed"))
    assert found["headline"] in (place / "page.html").read_text()
    assert ended.stderr.count("held: ") == 18


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["nothing_here:make"],
            '`factory = "nothing_here:make"`: there is no module nothing_here in {place}, and none is installed.',
        ),
        (
            ["certified_here:mak"],
            '`factory = "certified_here:mak"`: certified_here has no function mak. It has make, loss, one, short, half, frozen, '
            "unfit, words, bare.",
        ),
        (
            ["certified_here:one"],
            "The factory certified_here:one made Sequential; it must return a tuple of the model, `loss(model, batch)` and a "
            "list of at least two micro-batches.",
        ),
        (
            ["certified_here:short"],
            "The factory certified_here:short made micro-batches of one sample; give them two or more, so that they split.",
        ),
        (
            ["certified_here:half"],
            "The factory certified_here:half made a model in float16; a certificate is about one in float32: call `.float()`.",
        ),
        (["certified_here:frozen"], "The factory certified_here:frozen made a model without a parameter to train."),
        (
            ["certified_here:unfit"],
            "The model or its loss fails on the first micro-batch: TypeError: tuple indices must be integers or slices, not str "
            "({place}/certified_here.py, line 37)",
        ),
        (
            ["certified_here:words"],
            "The factory certified_here:words made micro-batches without a tensor; it must return a tuple of the model, "
            "`loss(model, batch)` and a list of at least two micro-batches.",
        ),
        (
            ["certified_here:make", "--set", "batch.global=4"],
            "`--set` sets keys of a configuration, and certified_here:make names a factory.",
        ),
        (["missing.toml"], "The configuration file missing.toml does not exist."),
    ],
)
def test_bad_input_is_one_sentence(place: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"halfstep: {sentence.format(place=place)}\n")
