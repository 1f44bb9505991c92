"""Reads what is to be checked: files, notebooks, standard input; and leaves out what cannot hold a training loop."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from halfstep.errors import SourceError

SKIPPED_FOLDERS = frozenset(
    {
        ".git",
        ".hg",
        ".venv",
        "venv",
        "node_modules",
        "__pycache__",
        ".mypy_cache",
        ".ruff_cache",
        ".tox",
        "build",
        "dist",
        ".eggs",
    }
)
MARKS = re.compile(
    rb"\.backward\(|manual_backward\(|GradScaler\(|autocast\(|DataLoader\(|DistributedSampler\(|_with_warmup\(|warmup|cpu\W[^\n]*non_blocking"
)
"""Words without which no rule has anything to say."""
MAX_BYTES = 4_000_000


@dataclass(frozen=True, slots=True)
class Source:
    """One text to check. `cells` holds, for a notebook, the first line of each code cell and its number."""

    path: str
    text: str
    cells: tuple[tuple[int, int], ...] = ()

    def cell_of(self, line: int) -> tuple[int | None, int]:
        """The cell that a line belongs to, and the line within it."""
        found: tuple[int | None, int] = (None, line)
        for first, number in self.cells:
            if line >= first:
                found = (number, line - first + 1)
        return found


def read(path: Path, forced: bool = False) -> Source | None:
    """The source of a file; None when nothing in it can concern a rule.

    Raises:
        SourceError: The file cannot be read.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}.") from error
    if len(raw) > MAX_BYTES or (not forced and MARKS.search(raw) is None):
        return None
    if path.suffix == ".ipynb":
        return _notebook(str(path), raw)
    return Source(str(path), decoded(raw))


def decoded(raw: bytes) -> str:
    """The text of a file, whatever its bytes are."""
    return raw.decode("utf-8-sig", errors="replace").replace("\0", " ").replace("\r\n", "\n").replace("\r", "\n")


def _notebook(path: str, raw: bytes) -> Source | None:
    try:
        cells = json.loads(decoded(raw)).get("cells", [])
    except (ValueError, AttributeError, RecursionError):
        return None
    lines: list[str] = []
    starts: list[tuple[int, int]] = []
    for number, cell in enumerate(cells if isinstance(cells, list) else [], 1):
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            starts.append((len(lines) + 1, number))
            text = cell.get("source", "")
            body = "".join(text) if isinstance(text, list) else str(text)
            lines.extend(_plain(line) for line in body.split("\n"))
    return Source(path, "\n".join(lines), tuple(starts))


def _plain(line: str) -> str:
    """A notebook's magics and shell lines are not Python."""
    stripped = line.lstrip()
    return f"{line[: len(line) - len(stripped)]}pass  # {stripped}" if stripped[:1] in ("%", "!") else line


def files_under(paths: list[str], exclude: list[str]) -> Iterator[Path]:
    """The Python files and notebooks at and below these paths.

    Raises:
        SourceError: A path does not exist.
    """
    for name in paths:
        path = Path(name)
        if path.is_dir():
            yield from _walk(path, exclude)
        elif path.exists():
            yield path
        else:
            raise SourceError(f"{name} does not exist. Give a file, a folder, or `-` for standard input.")


def _walk(folder: Path, exclude: list[str]) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        if any(entry.match(pattern) for pattern in exclude):
            continue
        if entry.is_dir():
            if entry.name not in SKIPPED_FOLDERS and not entry.is_symlink():
                yield from _walk(entry, exclude)
        elif entry.suffix in (".py", ".ipynb"):
            yield entry
