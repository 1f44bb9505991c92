"""A file of tensors in the safetensors format: a length, a JSON header, and the tensors' bytes end to end.

It is written here and not by the safetensors library because that makes a second copy of all tensors in memory first, and
because the checksum is taken as the bytes go by. The manifest says where each tensor lies, so that reading needs no header.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from halfstep.errors import ModelError

PIECE_BYTES = 2**22
"""What is written, and summed while it is in the cache, at a time."""
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""What safetensors calls the dtypes that it has."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file that is on the disk: its size, its CRC-32, and where each of its tensors begins."""

    size: int
    crc32: int
    begins: Sequence[int]


def write_tensors(path: Path, tensors: Sequence[tuple[str, torch.Tensor]]) -> Written:
    """Write named tensors, which lie on the host, to a new file, and see that they are on the disk.

    Raises:
        ModelError: a tensor has a dtype that safetensors does not know.
        OSError: the file cannot be written.
    """
    header, begins, place = {}, [], 0
    for name, tensor in tensors:
        if tensor.dtype not in NAMES:
            raise ModelError(f"`{name}` is {tensor.dtype}, which a checkpoint cannot keep.")
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.nbytes],
        }
        begins.append(place)
        place += tensor.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("xb") as file:
        crc32 = _write(file, len(head).to_bytes(8, "little") + head, 0)
        for _, tensor in tensors:
            crc32 = _write(file, bytes_of(tensor), crc32)
        file.flush()
        os.fsync(file.fileno())
    first = 8 + len(head)
    return Written(size=first + place, crc32=crc32, begins=[first + begin for begin in begins])


def _write(file: BinaryIO, content: bytes | memoryview, crc32: int) -> int:
    for start in range(0, len(content), PIECE_BYTES):
        piece = content[start : start + PIECE_BYTES]
        file.write(piece)
        crc32 = zlib.crc32(piece, crc32)
    return crc32


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the host; not a copy where it is contiguous."""
    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def read_tensor(file: BinaryIO, begin: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor that begins at a byte of a file."""
    tensor = torch.empty(tuple(shape), dtype=dtype)
    file.seek(begin)
    read = file.readinto(bytes_of(tensor))  # type: ignore[attr-defined]  # every buffered reader has it
    assert read == tensor.nbytes, "the file was checked against its manifest"
    return tensor


def crc32_of(path: Path) -> int:
    """The CRC-32 of a file."""
    crc32 = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            crc32 = zlib.crc32(piece, crc32)
    return crc32
