"""Writes that leave the old or the new, never half of one, and say in a sentence why they failed."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfstep.errors import UsageError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors which say that there is no room for a file."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write below this into one sentence about `path`.

    Raises:
        UsageError: the disk is full, or `path` cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(_sentence(path, error)) from error


def _sentence(path: Path, error: OSError) -> str:
    if error.errno in FULL:
        return f"{path} cannot be written: the disk is full. What was saved before is still there."
    return f"{path} cannot be written: {error.strerror or error}."


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


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path` when that has succeeded and vanishes when it has not.

    Raises:
        UsageError: the disk is full, or the folder cannot be written.
    """
    beside, old = path.with_name(path.name + ".partial"), path.with_name(path.name + ".old")
    with writing(path):
        try:
            beside.mkdir(parents=True)
            yield beside
            if path.exists():
                os.replace(path, old)
            os.replace(beside, path)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
