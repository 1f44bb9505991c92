"""Accelerators by name: peak rates, bandwidth and memory, read from a table that says where each figure comes from.

The table is `accelerators.tsv` beside this file (51 devices, November 2026). Rates are for dense products with FP32
accumulation. A peak is not a planning number: the time model takes the rate that matrix products reach (`matmul_tflops`).
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from halfstep.errors import DeviceError

TABLE = Path(__file__).with_name("accelerators.tsv")
GIB = 2**30
REACHABLE = 0.83
"""Share of the peak that large products reach where nobody measured it: A100 0.87, H100 0.80, B200 0.78 (ml-engineering)."""
VISIBLE = 0.985
"""Share of the memory that torch sees: 79.15 of 80 GiB on an A100, 139.8 of 141 on an H200."""
VISIBLE_WITH_ECC = 0.92
"""The same where error correction takes its bits out of graphics memory: 22.06 of 24 GiB on an A10G, 44.4 of 48 on an L40S."""
ECC_IN_MEMORY = ("T4", "A10", "A10G", "L4", "A40", "L40", "L40S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device.

    Attributes:
        name: as the table has it.
        generation: the first word of its architecture, as "Hopper".
        memory_bytes: nominal memory: what is sold as 80 GB is 80 GiB.
        bandwidth: bytes a second of its memory.
        tflops: peak TFLOP/s by format ("fp32", "tf32", "fp16", "bf16", "fp8"); a format without hardware is absent.
        matmul_share: share of the peak that large matrix products reach.
        link: bytes a second, one way, between devices of a machine.
        source: where the figures come from.
        confidence: how they are known: read, derived, recalled or disputed.
    """

    name: str
    generation: str
    memory_bytes: int
    bandwidth: float
    tflops: dict[str, float]
    matmul_share: float
    link: float
    source: str
    confidence: str

    @property
    def visible_bytes(self) -> float:
        """What torch can use of it."""
        return self.memory_bytes * (VISIBLE_WITH_ECC if self.name.split()[0] in ECC_IN_MEMORY else VISIBLE)


def accelerator(name: str) -> Accelerator:
    """The device that the user names: all words of it must be in the name of a device, as "A100-80GB" or "rtx 4090".

    Where several devices have them, the first with SXM is taken, else the first.

    Raises:
        DeviceError: no device has them; the nearest name is told.
    """
    wanted = _words(name)
    found = [each for each in accelerators() if wanted and wanted <= _words_of(each)]
    exact = [each for each in found if wanted == _words(each.name)]
    module = [each for each in found if "sxm" in _words(each.name)]
    if found:
        return (exact or module or found)[0]
    names = {each.name.lower(): each.name for each in accelerators()}
    near = get_close_matches(name.lower(), names, n=1, cutoff=0.4)
    hint = f"Did you mean {names[near[0]]}?" if near else f"It knows {', '.join(names.values())}."
    raise DeviceError(f"`--gpu {name}` is no device that the planner knows. {hint}")


@cache
def accelerators() -> tuple[Accelerator, ...]:
    """Every device of the table whose figures are numbers; those with two sizes of memory are two devices."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return tuple(_device(row, size) for row in rows if _number(row["mem_bw_gbs"]) for size in _sizes(row["mem_gb"]))


def _device(row: dict[str, str], size_gib: int) -> Accelerator:
    formats = ("fp32", "tf32", "fp16", "bf16", "fp8")
    peaks = {name: value for name in formats if (value := _number(row[f"{name}_tflops"]))}
    peak, reached = peaks.get("bf16"), _number(row["mamf_bf16_tflops"])
    return Accelerator(
        name=re.sub(r"[\d/]+GB$", f"{size_gib}GB", row["name"]),
        generation=row["arch"].split()[0],
        memory_bytes=size_gib * GIB,
        bandwidth=(_number(row["mem_bw_gbs"]) or 0) * 1e9,
        tflops=peaks,
        matmul_share=reached / peak if peak and reached else REACHABLE,
        link=(_number(row["interconnect_gbs_unidir"]) or 16) * 1e9,
        source=row["source"],
        confidence=row["confidence"],
    )


def _sizes(text: str) -> list[int]:
    """ "16|32" is two devices; "8-16" is sold with any memory between: the most."""
    return [int(part.split("-")[-1]) for part in text.split("|") if part]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _words(name: str) -> frozenset[str]:
    """Its words, with "SXM4" as "sxm", "80GB" as "80", and "RTX4090" as two."""
    words = re.findall(r"[a-z]+\d*[a-z]*|\d+", _spaced(name))
    return frozenset(re.sub(r"^sxm\d$", "sxm", word) for word in words)


def _words_of(device: Accelerator) -> frozenset[str]:
    return _words(device.name) | {str(device.memory_bytes // GIB)}


def _spaced(name: str) -> str:
    text = re.sub(r"rtx(?=\w)", "rtx ", name.lower())
    return re.sub(r"(?<=\d)\s*gi?b\b", "", text)
