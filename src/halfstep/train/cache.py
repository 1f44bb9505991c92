"""Tokenised documents kept on disk by what they were made of, and mapped into memory when they are read.

The folder's name is a digest of the files' content, the tokenizer, the settings and the version of this format, so that a
change in any of them is a new folder and a renamed file is not. It is written beside its place and renamed when it is
whole. Of two processes that need the same one, one makes it and the other waits; where a file system has no locks, both
make it, the second finds the first one's in place and leaves it there.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from halfstep.errors import DataError
from halfstep.measure.cache_folder import cache_dir
from halfstep.train.chat import Sample
from halfstep.train.disk import writing
from halfstep.train.documents import Documents

VERSION = 2
"""Of the files in a folder and of what makes them; a change of either makes all that was kept before unread."""
ABOUT = "documents.json"
FILES: Mapping[str, str] = {"tokens": "<u4", "counted": "?", "lengths": "<i8", "labels": "<i4"}
"""The arrays of a folder and the kind of number in each."""
READ_BYTES = 2**20


def key_of(contents: Iterable[Path | npt.NDArray[np.uint8]], tokenizer: Any, settings: Mapping[str, Any]) -> str:
    """The digest of everything that the documents depend on.

    Args:
        contents: files, folders of which every file counts, or bytes.
        tokenizer: of transformers; `None` where tokens are bytes.
        settings: whatever else decides what is made, as values that JSON can hold.

    Raises:
        DataError: a file cannot be read.
    """
    digest = hashlib.sha256(f"halfstep documents {VERSION}".encode())
    for content in contents:
        if isinstance(content, Path):
            files = sorted(each for each in content.rglob("*") if each.is_file()) if content.is_dir() else [content]
            digest.update(b"".join(map(_digest_of, files)))
        else:
            digest.update(hashlib.sha256(np.ascontiguousarray(content).data).digest())
        digest.update(b"next")
    digest.update(fingerprint(tokenizer).encode())
    digest.update(json.dumps(settings, sort_keys=True).encode())
    return digest.hexdigest()[:32]


def fingerprint(tokenizer: Any) -> str:
    """A digest of all that decides how a tokenizer makes tokens of text and of chats."""
    if tokenizer is None:
        return "bytes"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    parts = (type(tokenizer).__name__, rules, repr(tokenizer.special_tokens_map), repr(getattr(tokenizer, "chat_template", None)))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _digest_of(path: Path) -> bytes:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    return digest.digest()


def kept_documents(key: str, make: Callable[[], Iterable[Sample]], *, root: Path | None = None) -> tuple[Documents, bool]:
    """The documents of this key, made and kept if they are not there yet, and whether they were.

    Args:
        key: of `key_of`.
        make: yields the samples one at a time; it is not called where the documents are there.
        root: the folder of all that is kept; `None` for the user's cache folder.

    Raises:
        UsageError: the disk is full, the folder cannot be written, or `make` says so.
    """
    folder = (root or cache_dir() / "documents") / key
    found = _read(folder)
    if found is not None:
        return found, True
    with writing(folder), _one_at_a_time(folder):
        found = _read(folder)
        if found is not None:
            return found, True
        _write(folder, make())
    written = _read(folder)
    assert written is not None
    return written, False


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait for the others that make the same folder, where the file system can tell of them."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    with ExitStack() as stack:
        with suppress(NotImplementedError):
            stack.enter_context(lock)
        yield


def _write(folder: Path, samples: Iterable[Sample]) -> None:
    """Write the samples beside `folder` and move them there, unless another one is there by then."""
    beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    try:
        _fill(beside, samples)
        if _read(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)  # damaged, or nothing
            beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _fill(folder: Path, samples: Iterable[Sample]) -> None:
    sizes = dict.fromkeys(FILES, 0)
    names: dict[str, int] = {}
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / name).open("wb")) for name in FILES}
        for sample in samples:
            columns: dict[str, Sequence[Any]] = {
                "tokens": sample.tokens,
                "counted": sample.counted,
                "lengths": [len(sample.tokens)],
                "labels": [] if sample.label is None else [names.setdefault(sample.label, len(names))],
            }
            for name, values in columns.items():
                sizes[name] += _append(files[name], values, FILES[name])
    (folder / ABOUT).write_text(json.dumps({"version": VERSION, "bytes": sizes, "labels": list(names)}), encoding="utf-8")


def _append(file: IO[bytes], values: Sequence[Any], kind: str) -> int:
    return file.write(np.asarray(values, dtype=kind).tobytes())


def _read(folder: Path) -> Documents | None:
    """What is kept, mapped into memory; `None` where it is not there or not whole."""
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        whole = all((folder / name).stat().st_size == about["bytes"][name] for name in FILES)
    except (OSError, ValueError, LookupError, TypeError):
        return None
    if not whole or about.get("version") != VERSION:
        return None
    arrays = {name: _mapped(folder / name, kind) for name, kind in FILES.items()}
    lengths = np.array(arrays["lengths"], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    names = tuple(about["labels"])
    labels = np.array(arrays["labels"], dtype=np.int64) if names else None
    return Documents(
        tokens=arrays["tokens"], counted=arrays["counted"], starts=starts, lengths=lengths, labels=labels, label_names=names
    )


def _mapped(path: Path, kind: str) -> Any:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r")
