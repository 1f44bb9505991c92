"""Text: read from files or from Python's standard library, split into training and held-out text, made into tokens."""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from halfstep.errors import DataError

Tokens = npt.NDArray[np.generic]
"""A text as numbers, of the smallest unsigned kind that holds the vocabulary."""

STDLIB_BYTES = 8 * 2**20
STDLIB_LEFT_OUT = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3", "turtledemo")
)
"""Tests, what is installed beside the library, and files that are tables rather than text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One file's content.

    Attributes:
        name: what the file is called in messages; its digest places it in the order and in the split.
        content: its bytes.
    """

    name: str
    content: bytes


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
        content = (root / name).read_bytes()
        if 0 < len(content) <= free:
            texts.append(Text(name=name.as_posix(), content=content))
            free -= len(content)
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
    texts: dict[Path, Text] = {}
    for pattern in patterns:
        for text in _match(pattern, key) if glob.has_magic(pattern) else [_read(Path(pattern), key)]:
            texts.setdefault(Path(text.name).resolve(), text)
    return list(texts.values())


def _match(pattern: str, key: str) -> list[Text]:
    paths = [path for name in sorted(glob.glob(pattern, recursive=True)) if (path := Path(name)).is_file()]
    texts = [Text(name=str(path), content=content) for path in paths if (content := path.read_bytes())]
    if not texts:
        found = "only empty files match" if paths else "no file matches"
        raise DataError(f'`{key}`: {found} "{pattern}".')
    return texts


def _read(path: Path, key: str) -> Text:
    if path.is_dir():
        raise DataError(f'`{key}`: {path} is a folder. Use a pattern, as "{path}/**/*.txt".')
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"`{key}`: {path} does not exist.") from None
    except OSError as error:
        raise DataError(f"`{key}`: {path} cannot be read: {error.strerror}.") from None
    if not content:
        raise DataError(f"`{key}`: {path} is empty.")
    return Text(name=str(path), content=content)


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
    return Split(train=tuple(text for text in train if text.content), held_out=(end,) if end.content else (), how=how)


def _start_of_line(content: bytes, near: int) -> int:
    """The last start of a line before `near`; in a text of one line `near`, at a UTF-8 boundary."""
    line = content.rfind(b"\n", 0, near) + 1
    if line > 0:
        return line
    while near > 0 and near < len(content) and content[near] & 0xC0 == 0x80:
        near -= 1
    return near


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def unigram_entropy(texts: Iterable[Text]) -> float | None:
    """Nats per byte of a guess that knows how frequent each byte is and looks at no context; `None` without text."""
    counts = sum((np.bincount(_bytes(text), minlength=256) for text in texts), np.zeros(256, dtype=np.int64))
    seen = counts[counts > 0]
    if seen.size == 0:
        return None
    return float(np.log(seen.sum()) - (seen * np.log(seen)).sum() / seen.sum())


def byte_tokens(texts: Iterable[Text]) -> Tokens:
    """The texts' bytes one behind the other."""
    return np.concatenate([_bytes(text) for text in texts] or [np.zeros(0, dtype=np.uint8)])


def _bytes(text: Text) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text.content, dtype=np.uint8)


def tokens_of(texts: Iterable[Text], encode: Callable[[str], Sequence[int]], end: int | None) -> Tokens:
    """The texts' tokens one behind the other, with `end` behind each.

    Args:
        texts: UTF-8 texts.
        encode: from a string to its tokens.
        end: the token that ends a document; `None` where the tokenizer has none.

    Raises:
        DataError: a text is not UTF-8.
    """
    pieces: list[npt.NDArray[Any]] = [np.zeros(0, dtype=np.int32)]
    for text in texts:
        ids = list(encode(_decode(text)))
        pieces.append(np.asarray(ids if end is None else [*ids, end], dtype=np.int32))
    return np.concatenate(pieces)


def _decode(text: Text) -> str:
    try:
        return text.content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{text.name} is not UTF-8: byte {error.start:,} does not belong there. Convert the file, or use "
            '`data.tokenizer = "bytes"`.'
        ) from None
