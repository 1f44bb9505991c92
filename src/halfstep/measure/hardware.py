"""What a device is: its name, driver, memory and number formats, and the versions of what drives it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from halfstep.measure.dtypes import CPU_INFO, SupportTable, dtype_support
from halfstep.measure.memory import total_bytes

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
AMD_DRIVER = Path("/sys/module/amdgpu/version")
UNKNOWN = "unknown"


class Backend(str, Enum):
    """The software that drives a device."""

    CPU = "CPU"
    CUDA = "CUDA"
    ROCM = "ROCm"
    XPU = "XPU"
    MPS = "MPS"
    OTHER = "other"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device, described.

    Attributes:
        device: how torch calls it.
        backend: what drives it; ROCm devices are "cuda" to torch and told apart here.
        name: the maker's name for it.
        driver: version of the driver, "unknown", or "none" for the CPU.
        versions: name and version of each library that computes on it.
        memory_bytes: all its memory, or `None` where it does not tell.
        cores: CPU cores this process may use, or multiprocessors of a GPU; `None` where it does not tell.
        threads: threads that torch computes with on the CPU; `None` for an accelerator.
        dtypes: native, emulated and absent number formats.
    """

    device: torch.device
    backend: Backend
    name: str
    driver: str
    versions: dict[str, str]
    memory_bytes: int | None
    cores: int | None
    threads: int | None
    dtypes: SupportTable


def devices() -> list[torch.device]:
    """Every accelerator of this machine that torch can use, then the CPU."""
    if not torch.accelerator.is_available():
        return [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator()
    kind = accelerator.type if accelerator is not None else "cpu"
    return [*(torch.device(kind, index) for index in range(torch.accelerator.device_count())), torch.device("cpu")]


def describe(device: torch.device) -> Hardware:
    """The facts of `device`."""
    backend = backend_of(device)
    return Hardware(
        device=device,
        backend=backend,
        name=device_name(device),
        driver=DRIVERS[backend](device),
        versions=VERSIONS[backend](),
        memory_bytes=total_bytes(device),
        cores=_cores(device),
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        dtypes=dtype_support(device),
    )


def backend_of(device: torch.device) -> Backend:
    """What drives `device`."""
    if device.type == "cuda":
        return Backend.ROCM if torch.version.hip else Backend.CUDA
    known = {"cpu": Backend.CPU, "xpu": Backend.XPU, "mps": Backend.MPS}
    return known.get(device.type, Backend.OTHER)


def device_name(device: torch.device) -> str:
    """The maker's name of `device`."""
    if device.type == "cpu":
        return _cpu_name()
    module = torch.get_device_module(device)
    for named in ("get_device_name", "get_name"):
        if hasattr(module, named):
            return str(getattr(module, named)(*(() if device.type == "mps" else (device,))))
    return f"Apple GPU of {_cpu_name()}" if device.type == "mps" else UNKNOWN


def usable_cores() -> int:
    """CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cores(device: torch.device) -> int | None:
    if device.type == "cpu":
        return usable_cores()
    module = torch.get_device_module(device)
    if not hasattr(module, "get_device_properties"):
        return None
    properties = module.get_device_properties(device)
    counts = (getattr(properties, name, None) for name in ("multi_processor_count", "max_compute_units"))
    return next((count for count in counts if count is not None), None)


def _cpu_name() -> str:
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine()


def _no_driver(device: torch.device) -> str:
    return "none"


def _unknown_driver(device: torch.device) -> str:
    return UNKNOWN


def _nvidia_driver(device: torch.device) -> str:
    return _nvidia_driver_of_kernel() or _nvidia_driver_of_tool() or UNKNOWN


def _nvidia_driver_of_kernel() -> str:
    try:
        told = NVIDIA_DRIVER.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", told)
    return found.group(1) if found else ""


def _nvidia_driver_of_tool() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.splitlines()[0].strip() if told.strip() else ""


def _amd_driver(device: torch.device) -> str:
    try:
        return AMD_DRIVER.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return UNKNOWN


def _intel_driver(device: torch.device) -> str:
    return str(getattr(torch.xpu.get_device_properties(device), "driver_version", UNKNOWN))


def _apple_driver(device: torch.device) -> str:
    return f"macOS {platform.mac_ver()[0]}"


def _cpu_versions() -> dict[str, str]:
    told = torch.__config__.show()
    patterns = {"oneDNN": r"MKL-DNN v([\d.]+)", "MKL": r"Math Kernel Library Version ([\d.]+)"}
    found = {name: re.search(pattern, told) for name, pattern in patterns.items()}
    versions = {name: match.group(1) for name, match in found.items() if match}
    return {**versions, "instructions": torch.backends.cpu.get_cpu_capability()}


def _cuda_versions() -> dict[str, str]:
    versions = {"CUDA": torch.version.cuda or UNKNOWN}
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if cudnn is not None:
        versions["cuDNN"] = str(cudnn)
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        versions["NCCL"] = ".".join(str(part) for part in nccl)
    return versions


def _rocm_versions() -> dict[str, str]:
    return {"HIP": str(torch.version.hip)}


def _xpu_versions() -> dict[str, str]:
    return {"SYCL": str(getattr(torch.version, "xpu", None) or UNKNOWN)}


def _no_versions() -> dict[str, str]:
    return {}


DRIVERS: dict[Backend, Callable[[torch.device], str]] = {
    Backend.CPU: _no_driver,
    Backend.CUDA: _nvidia_driver,
    Backend.ROCM: _amd_driver,
    Backend.XPU: _intel_driver,
    Backend.MPS: _apple_driver,
    Backend.OTHER: _unknown_driver,
}
VERSIONS: dict[Backend, Callable[[], dict[str, str]]] = {
    Backend.CPU: _cpu_versions,
    Backend.CUDA: _cuda_versions,
    Backend.ROCM: _rocm_versions,
    Backend.XPU: _xpu_versions,
    Backend.MPS: _no_versions,
    Backend.OTHER: _no_versions,
}
