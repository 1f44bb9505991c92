"""The machine that is planned for: one of the table, or this one as it was measured."""

from __future__ import annotations

from halfstep.config.options import Precision
from halfstep.errors import DeviceError
from halfstep.plan.accelerators import Accelerator, accelerator
from halfstep.plan.calibration import Calibration
from halfstep.plan.memory import GB
from halfstep.plan.recipe import Recipe
from halfstep.plan.search import Machine
from halfstep.plan.time import Rates, rates_of

DEVICES_OF_A_MACHINE = 8
"""GPUs in one machine, where the user tells no other number of machines."""


def named(name: str, devices: int, memory_gb: float | None) -> Machine:
    """Devices of the table.

    Args:
        name: as the user names it.
        devices: how many.
        memory_gb: what each can use, where the user knows better.

    Raises:
        DeviceError: the table has no such device.
    """
    device = accelerator(name)
    tf32 = "; FP32 products are TF32" if "tf32" in device.tflops else ""
    return Machine(
        name=device.name,
        memory_bytes=memory_gb * GB if memory_gb else device.visible_bytes,
        devices=devices,
        nodes=-(-devices // DEVICES_OF_A_MACHINE),
        precisions=_precisions(device),
        rates=lambda recipe: _known_rates(device, recipe),
        source=f"not measured here, its figures are {device.confidence}{tf32}",
    )


def measured(calibration: Calibration, devices: int, memory_gb: float | None) -> Machine:
    """This machine, as it was measured."""
    known = tuple(each for each in (Precision.BF16, Precision.FP16, Precision.FP32) if str(each) in calibration.efficiency)
    known = tuple(sorted(known, key=lambda each: -calibration.matmul_tflops[str(each)] * calibration.efficiency[str(each)]))
    return Machine(
        name=calibration.device,
        memory_bytes=memory_gb * GB if memory_gb else calibration.memory_bytes,
        devices=devices,
        nodes=1,
        precisions=known,
        rates=lambda recipe: _measured_rates(calibration, recipe),
        source=f"measured on {calibration.measured} with torch {calibration.torch}",
    )


def _known_rates(device: Accelerator, recipe: Recipe) -> Rates:
    """What it reaches in a precision for which it has instructions."""
    wanted = {Precision.FP16: "fp16", Precision.FP32: "fp32"}.get(recipe.precision, "bf16")
    if wanted not in device.tflops:
        has = " or ".join(str(each) for each in _precisions(device))
        raise DeviceError(f"`--precision {recipe.precision}`: {device.name} has no instructions for it. Use {has}.")
    return rates_of(device, recipe)


def _measured_rates(calibration: Calibration, recipe: Recipe) -> Rates:
    rates = calibration.rates(recipe)
    if rates is None:
        known = ", ".join(calibration.efficiency)
        raise DeviceError(f"{recipe.precision} was not measured on {calibration.device}. Measured were {known}.")
    return rates


def _precisions(device: Accelerator) -> tuple[Precision, ...]:
    """BF16 where it is native, else FP16; and FP32."""
    low = Precision.BF16 if "bf16" in device.tflops else Precision.FP16 if "fp16" in device.tflops else None
    return (low, Precision.FP32) if low else (Precision.FP32,)
