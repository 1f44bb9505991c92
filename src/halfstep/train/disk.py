"""Writes that leave the old or the new, never half of one, and say in a sentence why they failed."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfstep.checkpoint.disk import writing as writing


def to_json(value: Any, *, indent: int | None = None) -> str:
    """`value` as JSON; numbers that are not finite, which JSON does not have, become `null`."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_text(path: Path, text: str) -> None:
    """Write a text file beside its place and move it there.

    Raises:
        UsageError: the disk is full, or the folder cannot be written.
    """
    beside = path.with_name(path.name + ".partial")
    with writing(path):
        try:
            beside.write_text(text, encoding="utf-8")
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


def mend(path: Path) -> None:
    """Undo what a killed run has left of taking the place of `path`."""
    old = path.with_name(path.name + ".old")
    if old.exists() and not path.exists():
        os.replace(old, path)
    for left in (path.with_name(path.name + ".partial"), old):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path` when that has succeeded and vanishes when it has not.

    Raises:
        UsageError: the disk is full, or the folder cannot be written.
    """
    beside, old = path.with_name(path.name + ".partial"), path.with_name(path.name + ".old")
    with writing(path):
        mend(path)
        try:
            beside.mkdir(parents=True)
            yield beside
            if path.exists():
                os.replace(path, old)
            os.replace(beside, path)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
