"""Where what was measured is kept from one run to the next. Needs no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """halfstep's part of the user's cache folder, by the rules of the platform. Nothing is created.

    Raises:
        RuntimeError: this user has no home folder.
    """
    asked = os.environ.get("XDG_CACHE_HOME", "")
    if Path(asked).is_absolute():
        return Path(asked) / "halfstep"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "halfstep"
    if sys.platform == "win32":
        return Path.home() / "AppData" / "Local" / "halfstep" / "cache"
    return Path.home() / ".cache" / "halfstep"
