"""What a checkpoint is made of: its files with their checksums, and where each tensor lies in them. JSON, never pickle."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfstep.checkpoint.tensor_file import crc32_of
from halfstep.errors import CheckpointError

NAME = "manifest.json"
KIND = "halfstep checkpoint"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of a tensor: where it begins in the tensor and in its file."""

    file: str
    begin: int
    offsets: Sequence[int]
    shape: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor: its dtype as safetensors calls it, its shape, and its parts."""

    dtype: str
    shape: Sequence[int]
    chunks: Sequence[Chunk]


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file's size and CRC-32."""

    size: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint.

    Attributes:
        update: updates made before it, applied or not.
        ranks: ranks that made it.
        files: by name.
        tensors: by name.
    """

    update: int
    ranks: int
    files: Mapping[str, File]
    tensors: Mapping[str, Stored]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, with its own checksum, and see that it is on the disk."""
    content = asdict(manifest)
    table = {"kind": KIND, "version": VERSION, "crc32": _crc32(content), "content": content}
    with (folder / NAME).open("x", encoding="utf-8") as file:
        json.dump(table, file)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged or of another version.
    """
    try:
        table = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint of halfstep: it holds no {NAME}.") from None
    except (OSError, ValueError):
        raise CheckpointError(f"{folder} is damaged: its {NAME} cannot be read.") from None
    if not isinstance(table, dict) or table.get("kind") != KIND:
        raise CheckpointError(f'{folder} is no checkpoint of halfstep: its {NAME} is not of the kind "{KIND}".')
    if table.get("version") != VERSION:
        raise CheckpointError(
            f"{folder} is a checkpoint of version {table.get('version')}; this halfstep reads version {VERSION}. "
            "Use the halfstep that wrote it."
        )
    content = table.get("content")
    if not isinstance(content, dict) or table.get("crc32") != _crc32(content):
        raise CheckpointError(f"{folder} is damaged: its {NAME} does not have the checksum that was written.")
    return _manifest(content)


def check_files(folder: Path, manifest: Manifest) -> None:
    """See that every file is there as it was written; reads all of them.

    Raises:
        CheckpointError: one is missing, too short, or has other bytes.
    """
    for name, file in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} is damaged: {name} is missing.")
        size = path.stat().st_size
        if size != file.size:
            raise CheckpointError(f"{folder} is damaged: {name} has {size:,} bytes, and {file.size:,} were written.")
        if crc32_of(path) != file.crc32:
            raise CheckpointError(f"{folder} is damaged: {name} does not have the checksum that was written.")


def _crc32(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _manifest(content: dict[str, Any]) -> Manifest:
    tensors = {
        name: Stored(dtype=stored["dtype"], shape=stored["shape"], chunks=[Chunk(**chunk) for chunk in stored["chunks"]])
        for name, stored in content["tensors"].items()
    }
    files = {name: File(**file) for name, file in content["files"].items()}
    return Manifest(update=content["update"], ranks=content["ranks"], files=files, tensors=tensors)
