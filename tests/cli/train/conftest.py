"""`halfstep train` on a tiny model: in this process, or in one of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from train_command import CONFIG, TEXT, Said, Train, command, environment, limit_files, with_set

from halfstep.cli.main import main


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder: it holds `text.txt` and `tiny.toml`, which keeps its run in `run`."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "tiny.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def train(place: Path, capsys: pytest.CaptureFixture[str]) -> Train:
    """`halfstep train tiny.toml WORDS` in this process; each word with a `=` is a setting."""

    def run(*words: str, config: str | None = "tiny.toml") -> Said:
        capsys.readouterr()
        code = main(["train", *([config] if config else []), *with_set(words)])
        said = capsys.readouterr()
        return Said(code=code, out=said.out, err=said.err)

    return run


@pytest.fixture
def train_apart(place: Path) -> Train:
    """The same in a process of its own."""

    def run(*words: str, largest_file: int | None = None) -> Said:
        done = subprocess.run(
            command(*words),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
            preexec_fn=None if largest_file is None else lambda: limit_files(largest_file),
        )
        return Said(code=done.returncode, out=done.stdout, err=done.stderr)

    return run
