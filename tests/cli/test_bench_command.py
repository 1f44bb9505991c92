"""`halfstep bench` as a command, on a model small enough to be measured in a moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.cli.main import main

CONFIG = """\
[model]
architecture = "gpt2"
config = { n_embd = 32, n_layer = 1, n_head = 2 }
[data]
files = ["text.txt"]
sequence_length = 16
"""


@pytest.mark.slow
def test_rows_are_measured_in_processes_of_their_own_and_kept(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("to be or not to be " * 200)
    rows = ["--row", "fp32:2x2", "--row", "bf16:2x2", "--rounds", "1", "--updates", "2"]
    command = [sys.executable, "-m", "halfstep", "bench", "small.toml", *rows, "--format", "json", "--save", "kept"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert [row["row"]["name"] for row in found["rows"]] == ["fp32, 2 x 2", "bf16, 2 x 2"]
    assert all(row["rate"]["value"] > 0 and row["failed"] is None for row in found["rows"])
    assert 0 < found["rows"][1]["loss_deviation"] < 0.05
    assert found["rows"][1]["verdict"] == "too few rounds to tell"
    assert found["subject"]["conditions"]["sequence"] == "16 tokens"
    assert json.loads((tmp_path / "kept" / "bench.json").read_text()) == found
    assert "halfstep bench" in (tmp_path / "kept" / "bench.html").read_text()
    assert "for `halfstep plan --gpu this`" in ended.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--row", "bf16"],
            "`--row bf16` is not a row: it must be PRECISION:MICROxACCUMULATE, as bf16:8x4 or bf16:8x4:compile.",
        ),
        (["--row", "bf17:8x4"], '`--row` is \'bf17\', which is not one of "fp32", "fp16", "bf16", "bf16-pure".'),
        (["--rounds", "0"], "`--rounds 0` must be above 0."),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert capsys.readouterr() == ("", f"halfstep: {sentence}\n")
