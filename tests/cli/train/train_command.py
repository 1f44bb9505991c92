"""A tiny model, a small text, and the words of `halfstep train` on them."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


def command(*words: str) -> list[str]:
    """The command line of `halfstep train tiny.toml WORDS`."""
    return [sys.executable, "-m", "halfstep", "train", "tiny.toml", *with_set(words)]


def with_set(words: Sequence[str]) -> list[str]:
    """The words, those with a `=` as settings."""
    return [part for word in words for part in (["--set", word] if "=" in word else [word])]


def environment() -> dict[str, str]:
    """One thread, and nothing that a launcher may have left."""
    return {**{key: value for key, value in os.environ.items() if key not in LAUNCHER}, "OMP_NUM_THREADS": "1"}


def limit_files(largest: int) -> None:
    """Let no file of this process grow beyond `largest` bytes: what a full disk looks like without one."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
