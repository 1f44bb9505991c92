"""Which line of the script led to what runs now."""

from __future__ import annotations

import sys
from enum import Enum
from functools import lru_cache
from pathlib import Path

import torch

from halfstep.events.vocabulary import Place

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")
"""Whose lines are never the script's: torch's, our own, and what has no file."""
COMMAND = str(Path(__file__).parents[2] / "cli" / "main.py")
"""Below it runs a command of ours: what called it, such as the console script, is no line of the user's."""
INSTALLED = ("site-packages", "dist-packages", str(Path(sys.base_prefix) / "lib"))


def line_of_script(*, until: str = "") -> Place | None:
    """The innermost line that is neither torch's nor ours, the script's own before an installed library's; None without one.

    Args:
        until: a file at whose frames the search ends.
    """
    frame, library = sys._getframe(1), None
    while frame is not None and frame.f_code.co_filename != until:
        path = frame.f_code.co_filename
        if path == COMMAND:
            return None
        owner = _owner(path)
        if owner is Owner.SCRIPT:
            return Place(path, frame.f_lineno)
        if owner is Owner.INSTALLED:
            library = library or Place(path, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return library


class Owner(Enum):
    """Whose a file is."""

    SCRIPT = 0
    INSTALLED = 1
    OURS = 2
    """torch's, halfstep's, or of no file."""


@lru_cache(maxsize=4096)
def _owner(path: str) -> Owner:
    if path.startswith(LIBRARIES):
        return Owner.OURS
    return Owner.INSTALLED if any(part in path for part in INSTALLED) else Owner.SCRIPT
