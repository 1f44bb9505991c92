"""One run in a folder at a time."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from halfstep.checkpoint.disk import writing
from halfstep.errors import UsageError


def lock(folder: Path) -> IO[str]:
    """Take a folder for this process until the file that is returned is closed, or the process ends, however it does.

    It is a lock of the process, which processes that it forks (a loader's workers) do not hold. Where the system has no such
    locks (Windows), none is taken.

    Raises:
        UsageError: another process has it.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a", encoding="utf-8")
    if find_spec("fcntl") is None:
        return file
    fcntl = import_module("fcntl")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UsageError(f"{folder} is in use by another run that is still going. Wait for it to end, or end it.") from None
    return file
