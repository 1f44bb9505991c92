"""`halfstep tune` as a command, on a model small enough to be measured in a moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.cli.main import main
from halfstep.config.load import load

CONFIG = """\
precision = "fp32"
[model]
architecture = "gpt2"
config = { n_embd = 32, n_layer = 1, n_head = 2 }
compile = false
[data]
files = ["text.txt"]
sequence_length = 16
[batch]
global = 2
"""


@pytest.mark.slow
def test_what_is_written_was_run_and_is_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("to be or not to be " * 200)
    command = [sys.executable, "-m", "halfstep", "tune", "small.toml", "--rounds", "1", "--updates", "2", "--format", "json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert [row["name"] for row in found["tried"]] == ["fp32, 1 x 2", "fp32, 2 x 1"]
    assert all(row["rate"]["value"] > 0 and row["allocated_bytes"] > 0 for row in found["tried"])
    assert found["winner"]["name"] in ("fp32, 1 x 2", "fp32, 2 x 1")
    written = load(tmp_path / "tuned.toml")
    assert (written.batch.global_, written.batch.micro) == (2, found["winner"]["micro"])
    assert not (tmp_path / "runs").exists()


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tuned.toml"
    path.write_text("mine")
    assert main(["tune", "--output", str(path)]) == 2
    assert capsys.readouterr().err == f"halfstep: {path} exists, and is not overwritten. Give `--output` another name.\n"
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rounds", "0"], "`--rounds 0` must be above 0."),
        (["--processes", "-1"], "`--processes -1` must be above 0."),
        (["--lr-updates", "5"], "`--lr-updates 5` says nothing of a learning rate. Use at least 10."),
        (["--margin", "1"], "`--margin 1.0` must be a share of the memory, at least 0 and below 1."),
        (["--output", "no/such.toml"], "no/such.toml cannot be written: there is no folder no."),
        (["no.toml"], "The configuration file no.toml does not exist."),
    ],
)
def test_what_cannot_be_tuned_is_told_in_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *words]) == 2
    assert capsys.readouterr() == ("", f"halfstep: {sentence}\n")
