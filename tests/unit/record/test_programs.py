"""Which commands are changed so that their programs are heard."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from halfstep.record.programs import followed

PYTHON = sys.executable


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, head in (("train.py", ""), ("ours", f"#!{PYTHON}\n"), ("theirs", "#!/usr/bin/python\n"), ("plain", "")):
        (tmp_path / name).write_text(head)
        (tmp_path / name).chmod(0o755)


@pytest.mark.parametrize(
    ("command", "options", "runs"),
    [
        ([PYTHON, "train.py", "-m"], [], ["train.py", "-m"]),
        ([PYTHON, "-u", "-W", "error", "-Xdev", Path("train.py")], ["-u", "-W", "error", "-Xdev"], ["train.py"]),
        ((PYTHON, "-OOu", "-m", "pack.train", "--lr", "3"), ["-OOu"], ["-m", "pack.train", "--lr", "3"]),
        (["./ours", "a b"], [], ["./ours", "a b"]),
    ],
)
def test_a_script_or_module_of_this_python_is_followed(command: list[str], options: list[str], runs: list[str]) -> None:
    words = followed(command, Path("folder"))
    assert words is not None
    assert words[: len(options) + 2] == [PYTHON, *options, "-c"]
    assert words[len(options) + 3 :] == ["folder", *runs]


@pytest.mark.parametrize(
    "command",
    [
        "python train.py",
        [PYTHON],
        [PYTHON, "-c", "pass"],
        [PYTHON, "-I", "train.py"],
        [PYTHON, "missing.py"],
        [PYTHON, b"train.py"],
        [PYTHON, str(Path(pytest.__file__))],
        ["./theirs"],
        ["./plain"],
        ["no-such-program", "train.py"],
    ],
)
def test_any_other_command_stays_as_it_is(command: list[str]) -> None:
    assert followed(command, Path("folder")) is None
