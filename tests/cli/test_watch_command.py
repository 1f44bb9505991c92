import json
import multiprocessing
import signal
import subprocess
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


def test_a_script_for_another_python_is_said_not_to_be_heard(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (script.parent / "other.py").write_text("")
    script.write_text("import subprocess, sys\nsubprocess.run(['env', sys.executable, 'other.py'], check=True)\n")
    assert main(["watch", str(script)]) == 0
    assert capsys.readouterr().err == (
        f"halfstep: `env {sys.executable} other.py` was not heard: only programs of {sys.executable} are. "
        "Write `python -m halfstep watch` into its command.\n"
    )


def test_a_program_that_the_script_starts_is_heard_and_keeps_its_arguments_and_exit_code(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    starts = (
        "import subprocess, sys\nprint(subprocess.run([sys.executable, '-u', 'train.py', 'a b', '-m']).returncode, flush=True)\n"
    )
    (script.parent / "starts.py").write_text(starts)
    script.write_text(f"{CLIPPED_TOO_EARLY}sys.exit(3)\n")
    assert main(["watch", "starts.py"]) == 1
    out = capfd.readouterr().out
    assert out.startswith("arguments ['a b', '-m'] __main__\n3\n")
    assert "--> train.py:13:5" in out


def test_a_module_is_run_with_its_options(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--select", "HS101", "-m", "train", "--lr", "3", "-m"]) == 1
    assert capsys.readouterr().out.startswith("arguments ['--lr', '3', '-m'] __main__\n")


def test_a_rule_that_does_not_exist_is_refused_before_the_run(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--select", "none", str(script)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "halfstep: `none` is no rule's name or code. `halfstep explain --all` lists them.\n"


TERMINATED = """\
import os, signal
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
assert signal.signal(signal.SIGTERM, lambda number, frame: print("handled", flush=True)) is signal.SIG_DFL
os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
print("dies", flush=True)
try:
    os.kill(os.getpid(), signal.SIGTERM)
finally:
    print("never: nothing of a script runs after it", flush=True)
"""


def test_sigterm_gives_a_report_and_ends_the_script_as_it_would_alone(script: Path) -> None:
    script.write_text(CLIPPED_TOO_EARLY + TERMINATED)
    done = subprocess.run([sys.executable, "-m", "halfstep", "watch", "train.py"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
    assert done.stdout.startswith("arguments [] __main__\nhandled\ndies\n\nHS101 error")
    assert "The script did not come to its end: it was ended by SIGTERM. 1 finding in 1 file." in done.stdout
