"""`halfstep convert` as a command: what goes where, and with which exit code."""

import subprocess
import sys

import pytest

from halfstep.cli.main import main

SCRIPT = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = [(torch.randn(4), torch.randn(1)) for _ in range(32)]
loader = DataLoader(data, batch_size=4)
model = nn.Linear(4, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))  # ä
        loss.backward()
        optimizer.step()
"""
WITH = "        with torch.autocast(device_type=device.type, dtype=torch.bfloat16):\n"


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def test_result_is_on_standard_output_and_the_rest_on_standard_error(script, capsys):
    assert main(["convert", str(script), "--precision", "bf16"]) == 0
    out, err = capsys.readouterr()
    assert WITH in out
    assert err == "converted: BF16 autocast around forward and loss (lines 13 to 14)\n"
    assert script.read_text(encoding="utf-8") == SCRIPT


def test_diff_is_a_unified_diff(script, capsys):
    assert main(["convert", str(script), "--precision", "bf16", "--diff"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"--- {script}\n+++ {script}\n@@ ")
    assert f"+{WITH}" in out


def test_output_and_in_place_write_files(script, tmp_path, capsys):
    assert main(["convert", str(script), "--precision", "bf16", "--output", str(tmp_path / "new.py")]) == 0
    assert main(["convert", str(script), "--precision", "bf16", "--in-place"]) == 0
    assert capsys.readouterr().out == ""
    assert (tmp_path / "new.py").read_text(encoding="utf-8") == script.read_text(encoding="utf-8")
    assert WITH in script.read_text(encoding="utf-8")


def test_second_conversion_changes_nothing_and_says_so(script, capsys):
    main(["convert", str(script), "--precision", "bf16", "--in-place"])
    once = script.read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["convert", str(script), "--precision", "bf16", "--in-place"]) == 2
    assert script.read_text(encoding="utf-8") == once
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"halfstep: nothing in {script} was converted: precision: the loop has autocast or a loss scaler already.\n"


def test_fault_that_was_there_on_another_line_does_not_take_a_pass_back(script, capsys):
    made = "scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)\nfor epoch"
    moved = "        optimizer.step()\n        scheduler.step()\n        scheduler.step()\n"
    script.write_text(SCRIPT.replace("for epoch", made).replace("        optimizer.step()\n", moved), encoding="utf-8")
    assert main(["convert", str(script), "--precision", "fp16"]) == 0
    out, err = capsys.readouterr()
    assert "scaler.scale(loss).backward()" in out
    assert "left: " not in err


def test_line_ends_and_byte_order_mark_are_kept(script):
    script.write_bytes(b"\xef\xbb\xbf" + SCRIPT.replace("\n", "\r\n").encode())
    assert main(["convert", str(script), "--precision", "bf16", "--in-place"]) == 0
    raw = script.read_bytes()
    assert raw.startswith(b"\xef\xbb\xbfimport torch\r\n")
    assert raw.count(b"\n") == raw.count(b"\r\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--accumulate", "0"], "--accumulate 0: an update has at least 1 micro-batch. Use 1 or more."),
        (["--diff", "--in-place"], "--output, --in-place and --diff exclude each other. Use one of them."),
        (
            ["--engine", "--ddp"],
            "--engine and --ddp exclude each other: under torchrun an engine joins the ranks by itself. Use one of them.",
        ),
        (["--output", "no/such/folder.py"], "no/such/folder.py cannot be written: No such file or directory."),
    ],
)
def test_wrong_options_are_one_sentence(script, capsys, words, sentence):
    assert main(["convert", str(script), *words]) == 2
    assert capsys.readouterr().err == f"halfstep: {sentence}\n"


def test_notebook_is_one_sentence(capsys):
    assert main(["convert", "train.ipynb"]) == 2
    said = "halfstep: train.ipynb is a notebook, and only Python files are converted: save its code as one.\n"
    assert capsys.readouterr().err == said


def test_missing_file_is_one_sentence(capsys):
    assert main(["convert", "nowhere.py"]) == 2
    assert capsys.readouterr().err == "halfstep: nowhere.py cannot be read: No such file or directory.\n"


def test_neither_torch_nor_the_script_is_imported(script):
    script.write_text(SCRIPT + "raise SystemExit('the script ran')\n", encoding="utf-8")
    code = f"import sys; from halfstep.cli.main import main; main(['convert', {str(script)!r}]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "the script ran" not in done.stderr
