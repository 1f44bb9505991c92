"""The measured rates of this machine, kept from one run to the next.

One JSON file a device under the user's cache folder. It is a convenience: a file that is damaged, foreign or cannot be
written means that the rates are measured again, and is never an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from halfstep.measure.cache_folder import cache_dir
from halfstep.measure.dtypes import Arithmetic
from halfstep.measure.hardware import device_name
from halfstep.measure.rates import RATE_UNIT, matmul_rates
from halfstep.measure.stats import Measured

Rates = Mapping[Arithmetic, Measured]


@dataclass(frozen=True, slots=True, kw_only=True)
class RateKey:
    """What the rates hold for: another device, torch or number of threads has rates of its own."""

    device: str
    torch: str
    threads: int

    @property
    def path(self) -> Path:
        """The file of these rates."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]
        return cache_dir() / "matmul-rates" / f"{digest}.json"


def known_or_measured_rates(device: torch.device, *, refresh: bool = False, budget_s: float = 1.0) -> Rates:
    """The rates of `device`, measured at most once a machine.

    Args:
        device: where to multiply.
        refresh: measure even where rates are known, and keep the new ones.
        budget_s: about how long to take for each number format.
    """
    known = None if refresh else known_rates(device)
    if known is not None:
        return known
    rates = matmul_rates(device, budget_s=budget_s)
    keep_rates(device, rates)
    return rates


def known_rates(device: torch.device) -> Rates | None:
    """The kept rates of `device`, or `None` where none are kept or the file is not to be trusted."""
    key = machine_of(device)
    try:
        kept = json.loads(key.path.read_text(encoding="utf-8"))
        rates = {Arithmetic(name): Measured(**fields) for name, fields in kept["rates"].items()}
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        return None
    sound = bool(rates) and all(_is_sound(rate) for rate in rates.values())
    return rates if sound and kept.get("key") == asdict(key) else None


def keep_rates(device: torch.device, rates: Rates) -> None:
    """Write the rates of `device`, whole or not at all: beside the file, then renamed over it."""
    key = machine_of(device)
    record = {"key": asdict(key), "rates": {str(name): asdict(rate) for name, rate in rates.items()}}
    with suppress(OSError, RuntimeError):
        write_whole(key.path, json.dumps(record, indent=2) + "\n")


def machine_of(device: torch.device) -> RateKey:
    """The device, torch and the threads of this process, on which every measurement depends."""
    return RateKey(device=device_name(device), torch=str(torch.__version__), threads=torch.get_num_threads())


def _is_sound(rate: Measured) -> bool:
    numbers = (rate.low, rate.value, rate.high)
    ordered = all(isinstance(number, (int, float)) for number in numbers) and 0 < rate.low <= rate.value <= rate.high
    return ordered and rate.unit == RATE_UNIT and isinstance(rate.count, int) and rate.count > 0


def write_whole(path: Path, text: str) -> None:
    """Write a file, and its folder where there is none, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
