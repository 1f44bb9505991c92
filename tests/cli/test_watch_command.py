import json
import multiprocessing
import sys
from pathlib import Path

import pytest

from halfstep.cli.main import main

CLIPPED_TOO_EARLY = """\
import sys
import torch
from torch import nn

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
for step in range(4):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(8, 4)).float().pow(2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
print("arguments", sys.argv[1:], __name__)
"""
RIGHT = CLIPPED_TOO_EARLY.replace("    nn.utils", "    scaler.unscale_(optimizer)\n    nn.utils")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(CLIPPED_TOO_EARLY)
    return path


def test_a_fault_is_named_with_its_line_and_exits_1(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(script), "--lr", "3"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("arguments ['--lr', '3'] __main__\n")
    assert "gradients of `optimizer` are clipped while multiplied by the loss scale [amp-clip-before-unscale]" in out
    assert "--> train.py:13:5" in out


def test_a_right_script_exits_0(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(RIGHT)
    assert main(["watch", str(script)]) == 0
    assert "4 updates heard. No findings in 1 file." in capsys.readouterr().out


def test_processes_that_were_there_before_the_script_are_not_waited_for(script: Path) -> None:
    """A hang here is the fault: the process ends only after the command."""
    context = multiprocessing.get_context("spawn")
    hold = context.Event()
    other = context.Process(target=hold.wait)
    other.start()
    try:
        assert main(["watch", str(script)]) == 1
        assert other.is_alive()
    finally:
        hold.set()
        other.join()


def test_json_is_alone_on_standard_output(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--format", "json", str(script)]) == 1
    out, err = capfd.readouterr()
    assert [f["rule"] for f in json.loads(out)["findings"]] == ["amp-clip-before-unscale"]
    assert "arguments [] __main__" in err


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("raise SystemExit(7)", 7, "it ended itself with exit code 7"),
        ("raise KeyboardInterrupt", 130, "it was interrupted (Ctrl-C)"),
        ("torch.empty(10**15)", 1, "it raised RuntimeError"),
    ],
)
def test_the_scripts_exit_code_is_kept_and_it_is_judged(
    script: Path, capsys: pytest.CaptureFixture[str], ending: str, code: int, said: str
) -> None:
    script.write_text(f"{CLIPPED_TOO_EARLY}{ending}\n")
    assert main(["watch", str(script)]) == code
    out = capsys.readouterr().out
    assert said in out
    assert "[amp-clip-before-unscale]" in out


def test_a_missing_script_exits_2_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "none.py"]) == 2
    expected = "halfstep: there is no script 'none.py' to watch. Give a file, or `-m` and the name of a module.\n"
    assert capsys.readouterr().err == expected


def test_nothing_to_watch_exits_2_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch"]) == 2
    expected = "halfstep: nothing to watch: give a training script, or `-m` and the name of a module.\n"
    assert capsys.readouterr().err == expected


def test_a_script_that_was_started_as_a_program_of_its_own_is_said_not_to_be_heard(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (script.parent / "other.py").write_text("")
    script.write_text("import subprocess, sys\nsubprocess.run([sys.executable, 'other.py'], check=True)\n")
    assert main(["watch", str(script)]) == 0
    name = Path(sys.executable).name
    assert capsys.readouterr().err == (
        f"halfstep: `{name} other.py` was started as a program of its own and not heard. "
        "Write `python -m halfstep watch` into its command to hear it.\n"
    )
