"""Reads what is to be checked: files, notebooks, standard input; and leaves out what cannot hold a training loop."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from halfstep.errors import SourceError
from halfstep.imagine.notebook import Cell, cells_of, written

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
    """One text to check; of a notebook with its code cells."""

    path: str
    text: str
    cells: tuple[Cell, ...] = ()

    def cell_of(self, line: int) -> Cell | None:
        """The cell that a line belongs to."""
        return next((cell for cell in self.cells if cell.first <= line < cell.end), None)

    def part(self, cell: int | None) -> str:
        """The text of a cell, by its number; all of it where none is named."""
        own = next((c for c in self.cells if c.number == cell), None)
        return self.text if own is None else "\n".join(self.text.split("\n")[own.first - 1 : own.end - 1])


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
        found = cells_of(decoded(raw))
        return Source(str(path), *found) if found is not None else None
    return Source(str(path), decoded(raw))


def decoded(raw: bytes) -> str:
    """The text of a file, whatever its bytes are."""
    return raw.decode("utf-8-sig", errors="replace").replace("\0", " ").replace("\r\n", "\n").replace("\r", "\n")


def rewritten(raw: bytes, after: Source) -> bytes:
    """A file with another text, its byte order mark, line ends and everything that is not code as they were.

    Raises:
        SourceError: The file is not in UTF-8.
    """
    mark = b"\xef\xbb\xbf" if raw.startswith(b"\xef\xbb\xbf") else b""
    try:
        raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SourceError(
            f"{after.path} is not in UTF-8 and would lose letters: it is left as it is. Save it in UTF-8."
        ) from None
    text = written(decoded(raw), after.text, after.cells) if after.cells else after.text
    return mark + (text.replace("\n", "\r\n") if b"\r\n" in raw else text).encode()


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
