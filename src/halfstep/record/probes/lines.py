"""Which line of the script led to what runs now."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from halfstep.events.vocabulary import Place

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")
"""Whose lines are never the script's: torch's, our own, and what has no file."""
INSTALLED = ("site-packages", "dist-packages", str(Path(sys.base_prefix) / "lib"))


def line_of_script(*, until: str = "") -> Place | None:
    """The innermost line that is neither torch's nor ours, the script's own before an installed library's; None without one.

    Args:
        until: a file at whose frames the search ends.
    """
    frame, library = sys._getframe(1), None
    while frame is not None and frame.f_code.co_filename != until:
        path = frame.f_code.co_filename
        if not path.startswith(LIBRARIES):
            place = Place(path, frame.f_lineno)
            if not any(part in path for part in INSTALLED):
                return place
            library = library or place
        frame = frame.f_back  # type: ignore[assignment]
    return library
