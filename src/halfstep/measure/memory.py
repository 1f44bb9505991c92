"""Bytes in use: of an accelerator through torch's allocator, of the CPU through the operating system."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

PROCESS_STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
CONTAINER_USE = Path("/sys/fs/cgroup/memory.current")
MEMORY_OF_MACHINE = Path("/proc/meminfo")
RESET_PEAK_RSS = "5"
"""What Linux takes in `clear_refs` for "forget the highest resident set so far" (proc(5))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory in use now, and at its highest since `reset_peak`. `None` where the device does not tell.

    Attributes:
        allocated_bytes: held by tensors; on the CPU, the resident set of this process.
        reserved_bytes: taken from the device by the allocator, tensors included; on the CPU, the same resident set.
        peak_allocated_bytes: the highest `allocated_bytes`; on the CPU, the highest resident set.
        peak_reserved_bytes: the highest `reserved_bytes`.
    """

    allocated_bytes: int | None
    reserved_bytes: int | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None


def memory_use(device: torch.device) -> MemoryUse:
    """What this process holds on `device`."""
    if device.type == "cpu":
        resident, peak = resident_bytes(), peak_resident_bytes()
        return MemoryUse(
            allocated_bytes=resident,
            reserved_bytes=resident,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=peak,
        )
    return _mps_use() if device.type == "mps" else _accelerator_use(device)


def reset_peak(device: torch.device) -> bool:
    """Start to look for the highest use anew; False where the device cannot forget its highest."""
    if device.type == "cpu":
        return _reset_peak_resident()
    module = torch.get_device_module(device)
    if not hasattr(module, "reset_peak_memory_stats"):
        return False
    module.reset_peak_memory_stats(device)
    return True


def total_bytes(device: torch.device) -> int | None:
    """All the memory of `device`; for the CPU, that of the machine."""
    if device.type == "cpu":
        return _machine_bytes()
    module = torch.get_device_module(device)
    if device.type == "mps":
        return int(module.recommended_max_memory())
    properties = module.get_device_properties(device)
    total = getattr(properties, "total_memory", None)
    return None if total is None else int(total)


def free_bytes(device: torch.device) -> int | None:
    """Memory of `device` that nobody uses; for the CPU, that of the machine. `None` where it is not told."""
    if device.type == "cpu":
        return _free_of_machine()
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    free, _ = module.mem_get_info(device)
    return int(free) + int(module.memory_reserved(device)) - int(module.memory_allocated(device))


def resident_bytes() -> int | None:
    """The resident set of this process: memory that is in RAM now, shared libraries included."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int | None:
    """The highest resident set of this process since its start, or since `reset_peak` of the CPU."""
    peak = _status_bytes("VmHWM")
    return _peak_of_rusage() if peak is None else peak


def _accelerator_use(device: torch.device) -> MemoryUse:
    module = torch.get_device_module(device)
    return MemoryUse(
        allocated_bytes=int(module.memory_allocated(device)),
        reserved_bytes=int(module.memory_reserved(device)),
        peak_allocated_bytes=int(module.max_memory_allocated(device)),
        peak_reserved_bytes=int(module.max_memory_reserved(device)),
    )


def _mps_use() -> MemoryUse:
    """Metal's allocator keeps no highest use."""
    return MemoryUse(
        allocated_bytes=int(torch.mps.current_allocated_memory()),
        reserved_bytes=int(torch.mps.driver_allocated_memory()),
        peak_allocated_bytes=None,
        peak_reserved_bytes=None,
    )


def _free_of_machine() -> int | None:
    """What is available, or what a container may still take where that is less."""
    limit, used = _container_bytes(CONTAINER_LIMIT), _container_bytes(CONTAINER_USE)
    left = None if limit is None or used is None else max(0, limit - used)
    return min((size for size in (_field_bytes(MEMORY_OF_MACHINE, "MemAvailable"), left) if size is not None), default=None)


def _status_bytes(field: str) -> int | None:
    return _field_bytes(PROCESS_STATUS, field)


def _field_bytes(path: Path, field: str) -> int | None:
    """A line "Field:  123 kB" of a file of the kernel."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    values = [line.split() for line in lines if line.startswith(f"{field}:")]
    return int(values[0][1]) * 1024 if values else None


def _peak_of_rusage() -> int | None:
    """`ru_maxrss` counts bytes on macOS and KiB elsewhere; Windows has none."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _reset_peak_resident() -> bool:
    try:
        CLEAR_REFS.write_text(RESET_PEAK_RSS, encoding="ascii")
    except OSError:
        return False
    return True


def _machine_bytes() -> int | None:
    """Physical memory, or the limit of the container where that is less."""
    known = [size for size in (_physical_bytes(), _container_bytes(CONTAINER_LIMIT)) if size is not None]
    return min(known, default=None)


def _physical_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _container_bytes(path: Path) -> int | None:
    try:
        told = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(told) if told.isdigit() else None
