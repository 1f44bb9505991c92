"""Writes that are on the disk when they return, and say in a sentence why they failed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


def sync_folder(path: Path) -> None:
    """See that the names in a folder are on the disk."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
