"""A tiny model, a small text, and `halfstep train` on them: in this process, or in one of its own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from halfstep.cli.main import main

TEXT = "".join(f"line {number}: the quick brown fox jumps over {number * 7 % 13} lazy dogs\n" for number in range(120))
CONFIG = """\
precision = "fp32"

[model]
architecture = "llama"
config = {hidden_size = 16, intermediate_size = 32, num_hidden_layers = 1, num_attention_heads = 2, num_key_value_heads = 2}

[data]
files = "text.txt"
sequence_length = 32

[batch]
global = 8
micro = 2

[limits]
updates = 6

[run]
folder = "run"
"""
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str


Train = Callable[..., Said]


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


def command(*words: str) -> list[str]:
    """The command line of `halfstep train tiny.toml WORDS`."""
    return [sys.executable, "-m", "halfstep", "train", "tiny.toml", *with_set(words)]


def with_set(words: tuple[str, ...]) -> list[str]:
    return [part for word in words for part in (["--set", word] if "=" in word else [word])]


def environment() -> dict[str, str]:
    """One thread, and nothing that a launcher may have left."""
    return {**{key: value for key, value in os.environ.items() if key not in LAUNCHER}, "OMP_NUM_THREADS": "1"}


def limit_files(largest: int) -> None:
    """Let no file of this process grow beyond `largest` bytes: what a full disk looks like without one."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
