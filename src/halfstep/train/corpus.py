"""Text: from files or from Python's standard library, split into training and held-out text, made into tokens.

Much text is mapped into memory and never read as a whole, so that it may be larger than memory.
"""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from halfstep.errors import DataError
from halfstep.train.chat import Sample

Bytes = npt.NDArray[np.uint8]
IN_MEMORY_BYTES = 64 * 2**20
"""Text up to which files are read; more of it is mapped."""
BLOCK_BYTES = 2**20
"""What is looked at at a time."""
LOOKED_AT_BYTES = 8192
"""Of each file, to see that it is text."""
ROWS_BY_NAME = "Files with rows are known by their names: .jsonl, .csv, .parquet."
PIECE_BYTES = 2**18
"""What becomes tokens at a time, for which a tokenizer holds 200 times as much."""
STDLIB_BYTES = 8 * 2**20
STDLIB_LEFT_OUT = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3", "turtledemo")
)
"""Tests, what is installed beside the library, and files that are tables rather than text."""


class Mapped:
    """A file's bytes, which are there where they are looked at.

    Args:
        path: the file.
        size: its bytes.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size

    def __len__(self) -> int:
        """The number of bytes."""
        return self._size

    def __getitem__(self, places: slice | npt.NDArray[np.int64]) -> Bytes:
        """The bytes at these places."""
        return _opened(self._path)[places]


@lru_cache(maxsize=64)
def _opened(path: Path) -> Bytes:
    """Of many files some stay open: a process may not have them all."""
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One file's content.

    Attributes:
        name: what the file is called in messages; its digest places it in the order and in the split.
        content: its bytes.
    """

    name: str
    content: Bytes | Mapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Texts to train on, texts held out, and a sentence on how they were chosen."""

    train: tuple[Text, ...]
    held_out: tuple[Text, ...]
    how: str


def read_stdlib(at_most_bytes: int = STDLIB_BYTES) -> list[Text]:
    """The source files of Python's standard library without its tests, in an order given by their names alone.

    Raises:
        DataError: this Python has no source text beside it.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = [name for name in names if not STDLIB_LEFT_OUT & set(name.parts)]
    texts: list[Text] = []
    free = at_most_bytes
    for name in sorted(kept, key=lambda name: _digest(name.as_posix())):
        size = (root / name).stat().st_size
        if 0 < size <= free:
            texts.append(Text(name=name.as_posix(), content=np.fromfile(root / name, dtype=np.uint8)))
            free -= size
    if not texts:
        raise DataError(f"{root} holds no source text of Python's standard library. Name text files in `data.files`.")
    return texts


def read_files(patterns: Sequence[str], *, key: str) -> list[Text]:
    """The files that the paths and patterns name, each once, in the order of the patterns.

    Args:
        patterns: paths, or patterns with `*`, `?`, `[...]` and `**`.
        key: the setting that they come from, for messages.

    Raises:
        DataError: a path does not exist, is a folder or holds nothing; a pattern matches no text.
    """
    sizes: dict[Path, tuple[Path, int]] = {}
    for pattern in patterns:
        for path in _match(pattern, key) if glob.has_magic(pattern) else [_named(Path(pattern), key)]:
            sizes.setdefault(path.resolve(), (path, path.stat().st_size))
    mapped = sum(size for _, size in sizes.values()) > IN_MEMORY_BYTES
    texts = [Text(name=str(path), content=_content(path, size, key, mapped=mapped)) for path, size in sizes.values()]
    for text in texts:
        if not text.content[:LOOKED_AT_BYTES].all():
            raise DataError(f"`{key}`: {text.name} is no text: there are zero bytes in it. {ROWS_BY_NAME}")
    return texts


def _match(pattern: str, key: str) -> list[Path]:
    paths = [path for name in sorted(glob.glob(pattern, recursive=True)) if (path := Path(name)).is_file()]
    full = [path for path in paths if path.stat().st_size > 0]
    if not full:
        found = "only empty files match" if paths else "no file matches"
        raise DataError(f'`{key}`: {found} "{pattern}".')
    return full


def _named(path: Path, key: str) -> Path:
    if path.is_dir():
        raise DataError(f'`{key}`: {path} is a folder. Use a pattern, as "{path}/**/*.txt".')
    if not path.exists():
        raise DataError(f"`{key}`: {path} does not exist.")
    if path.stat().st_size == 0:
        raise DataError(f"`{key}`: {path} is empty.")
    return path


def _content(path: Path, size: int, key: str, *, mapped: bool) -> Bytes | Mapped:
    try:
        if not mapped:
            return np.fromfile(path, dtype=np.uint8)
        _opened(path)
    except OSError as error:
        raise DataError(f"`{key}`: {path} cannot be read: {error.strerror}.") from None
    return Mapped(path, size)


def split(texts: Sequence[Text], share: float) -> Split:
    """Hold out about `share` of the bytes: whole files, or the end of the longest where whole files are too much."""
    total = sum(len(text.content) for text in texts)
    chosen = _choose_files(texts, share * total)
    if chosen:
        held_out = tuple(text for text in texts if text.name in chosen)
        size = sum(len(text.content) for text in held_out)
        how = f"{len(held_out)} of {len(texts)} files, {size / total:.1%} of the text"
        return Split(train=tuple(text for text in texts if text.name not in chosen), held_out=held_out, how=how)
    return _split_longest(texts, round(share * total))


def split_off(texts: Sequence[Text], held_out: Sequence[Text]) -> Split:
    """Hold out the texts that the user named, also where they are among those to train on.

    Raises:
        DataError: nothing is left to train on.
    """
    names = {Path(text.name).resolve() for text in held_out}
    train = tuple(text for text in texts if Path(text.name).resolve() not in names)
    if not train:
        raise DataError("Every file of `data.files` is also in `evaluation.files`: nothing is left to train on.")
    return Split(train=train, held_out=tuple(held_out), how=f"{len(held_out)} files named in `evaluation.files`")


def _choose_files(texts: Sequence[Text], budget_bytes: float) -> frozenset[str]:
    """Names of whole files that come near the budget, in the order of their digests; none where none fits."""
    chosen: set[str] = set()
    taken = 0
    for text in sorted(texts, key=lambda text: _digest(text.name)):
        if taken + len(text.content) <= budget_bytes:
            chosen.add(text.name)
            taken += len(text.content)
    return frozenset(chosen if taken >= budget_bytes / 2 else ())


def _split_longest(texts: Sequence[Text], held_out_bytes: int) -> Split:
    longest = max(texts, key=lambda text: len(text.content))
    cut = _start_of_line(longest.content, len(longest.content) - held_out_bytes)
    end = Text(name=f"{longest.name} (end)", content=longest.content[cut:])
    start = Text(name=longest.name, content=longest.content[:cut])
    train = tuple(start if text is longest else text for text in texts)
    how = f"the last {len(end.content):,} bytes of {longest.name}, because whole files would be too much"
    return Split(train=tuple(text for text in train if len(text.content)), held_out=(end,) if len(end.content) else (), how=how)


def _start_of_line(content: Bytes | Mapped, near: int) -> int:
    """The last start of a line before `near`; in a text of one line `near`, at a UTF-8 boundary."""
    for end in range(near, 0, -BLOCK_BYTES):
        begin = max(0, end - BLOCK_BYTES)
        line = content[begin:end].tobytes().rfind(b"\n")
        if line >= 0:
            return begin + line + 1
    while near > 0 and near < len(content) and content[near : near + 1].item() & 0xC0 == 0x80:
        near -= 1
    return near


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def unigram_entropy(texts: Iterable[Text]) -> float | None:
    """Nats per byte of a guess that knows how frequent each byte is and looks at no context; `None` without text."""
    counts = np.zeros(256, dtype=np.int64)
    for text in texts:
        for begin in range(0, len(text.content), BLOCK_BYTES):
            counts += np.bincount(text.content[begin : begin + BLOCK_BYTES], minlength=256)
    seen = counts[counts > 0]
    if seen.size == 0:
        return None
    return float(np.log(seen.sum()) - (seen * np.log(seen)).sum() / seen.sum())


class Joined:
    """Texts one behind the other, where they lie.

    Args:
        parts: what is joined.
    """

    def __init__(self, parts: Sequence[Bytes | Mapped]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        """The number of bytes."""
        return int(self._ends[-1])

    def __getitem__(self, places: npt.NDArray[np.int64]) -> Bytes:
        """The bytes at these places."""
        which = np.searchsorted(self._ends, places, side="right")
        found = np.empty(places.shape, dtype=np.uint8)
        for number in np.unique(which).tolist():
            here, part = which == number, self._parts[number]
            found[here] = part[places[here] - (self._ends[number] - len(part))]
        return found


Tokens = npt.NDArray[Any] | Mapped | Joined
"""A text as numbers."""


def byte_tokens(texts: Sequence[Text]) -> Tokens:
    """The texts' bytes one behind the other; of much text no copy."""
    parts = [text.content for text in texts]
    if len(parts) == 1:
        return parts[0]
    if sum(map(len, parts)) > IN_MEMORY_BYTES:
        return Joined(parts)
    return np.concatenate([np.zeros(0, dtype=np.uint8), *(part[:] for part in parts)])


def samples_of(texts: Iterable[Text], encode: Callable[[str], Sequence[int]], end: int | None) -> Iterator[Sample]:
    """The texts' tokens in their order, a piece of whole lines at a time, with `end` behind each text.

    Tokens do not go over the edge of a piece. A text of at most `PIECE_BYTES` is one piece.

    Args:
        texts: UTF-8 texts.
        encode: from a string to its tokens.
        end: the token that ends a document; `None` where the tokenizer has none.

    Raises:
        DataError: a text is not UTF-8.
    """
    for text in texts:
        begin, size = 0, len(text.content)
        while begin < size:
            rest = text.content[begin:]
            length = len(rest) if len(rest) <= PIECE_BYTES else _start_of_line(rest, PIECE_BYTES)
            tokens = list(encode(_decoded(text, begin, begin + length)))
            begin += length
            if end is not None and begin == size:
                tokens.append(end)
            if tokens:
                yield Sample(tokens=tokens, counted=[True] * len(tokens))


def _decoded(text: Text, begin: int, end: int) -> str:
    try:
        return text.content[begin:end].tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{text.name} is not UTF-8: byte {begin + error.start:,} does not belong there. Convert the file, or use "
            '`data.tokenizer = "bytes"`.'
        ) from None
