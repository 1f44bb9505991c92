"""What a machine was measured to reach, kept as a file that planning reads without torch.

`halfstep.measure.calibrating` makes one; `halfstep plan --gpu this` plans with the newest. The file is JSON: the fields of
`Calibration`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from halfstep.config.options import Precision
from halfstep.plan.recipe import Recipe
from halfstep.plan.time import CALIBRATED_SPREAD, Rates

FOLDER = "calibration"
ATTENTION_AGAINST_PRODUCTS = 0.5
"""Rate of fused attention against that of a model's products, where only these were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What one device was measured to reach.

    Attributes:
        device: the maker's name.
        torch: the version that was measured with.
        threads: threads that torch computes with; 0 where that says nothing.
        memory_bytes: all memory of the device.
        matmul_tflops: TFLOP/s of large matrix products, by precision ("fp32", "bf16", "fp16", "bf16-pure").
        efficiency: share of that rate which the products of a real model's update reached, by precision.
        convolutions: share of the rate of a model's products that convolutions reached.
        bandwidth_gbs: GB/s that elementwise work reached.
        launch_us: microseconds that a kernel takes to start.
        measured: the day, as 2026-11-29.
    """

    device: str
    torch: str
    threads: int
    memory_bytes: int
    matmul_tflops: Mapping[str, float]
    efficiency: Mapping[str, float]
    convolutions: float
    bandwidth_gbs: float
    launch_us: float
    measured: str

    def rates(self, recipe: Recipe) -> Rates | None:
        """What it reaches in the precision of the recipe, or `None` where that was not measured."""
        name = str(recipe.precision)
        if recipe.precision is Precision.BF16_PURE and name not in self.matmul_tflops:
            name = str(Precision.BF16)
        if name not in self.matmul_tflops or name not in self.efficiency:
            return None
        products = self.matmul_tflops[name] * self.efficiency[name] * 1e12
        return Rates(
            matmul=products,
            attention=products * ATTENTION_AGAINST_PRODUCTS,
            bandwidth=self.bandwidth_gbs * 1e9,
            link=self.bandwidth_gbs * 1e9 / 4,
            launch_s=self.launch_us * 1e-6,
            convolutions=self.convolutions,
            full_width=1,
            spread=CALIBRATED_SPREAD,
        )


def keep(calibration: Calibration, cache: Path) -> Path:
    """Write it under the cache folder, over an older one of the same device, torch and threads; whole or not at all."""
    known = json.dumps([calibration.device, calibration.torch, calibration.threads])
    path = cache / FOLDER / f"{hashlib.sha256(known.encode()).hexdigest()[:16]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(json.dumps(asdict(calibration), indent=2) + "\n", encoding="utf-8")
    os.replace(beside, path)
    return path


def kept(cache: Path) -> Calibration | None:
    """The newest calibration that is kept under the cache folder; a file that is damaged or foreign is passed over."""
    files = sorted((cache / FOLDER).glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next(filter(None, map(_read, files)), None)


def _read(path: Path) -> Calibration | None:
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        calibration = Calibration(**{field.name: told[field.name] for field in fields(Calibration)})
        numbers = [*calibration.matmul_tflops.values(), *calibration.efficiency.values()]
        numbers += [calibration.bandwidth_gbs, calibration.convolutions]
        sound = all(isinstance(number, (int, float)) and number > 0 for number in numbers)
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None
    return calibration if sound else None
