"""Which number formats a device computes in by itself, which it emulates, and which it lacks."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")
TENSOR_CORES = (7, 0)
AMPERE = (8, 0)
FULL_RATE_FP16_BEFORE_TENSOR_CORES = ((5, 3), (6, 0), (6, 2))
MACOS_WITH_BF16 = (14, 0)


class Arithmetic(str, Enum):
    """The number format that a matrix product is computed in. TF32 takes FP32 and rounds its inputs to 11 bits."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"

    def __str__(self) -> str:
        return self.value

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensors that go in and come out."""
        return DTYPES[self]


DTYPES = {
    Arithmetic.FP32: torch.float32,
    Arithmetic.TF32: torch.float32,
    Arithmetic.BF16: torch.bfloat16,
    Arithmetic.FP16: torch.float16,
}


class Support(str, Enum):
    """How a device computes in a number format."""

    NATIVE = "native"
    """With instructions of its own."""
    EMULATED = "emulated"
    """By way of another format: right, and as a rule slower than that format."""
    ABSENT = "absent"
    """Not at all."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeSupport:
    """How a device computes in one number format, and what tells so."""

    support: Support
    because: str

    @property
    def native(self) -> bool:
        """Whether the device has instructions for it."""
        return self.support is Support.NATIVE


SupportTable = Mapping[Arithmetic, DtypeSupport]


def dtype_support(device: torch.device) -> SupportTable:
    """The support of every `Arithmetic` on `device`."""
    if device.type == "cpu":
        return cpu_support(cpu_flags())
    if device.type == "cuda":
        return _cuda_device_support(device)
    if device.type == "xpu":
        return xpu_support(torch.xpu.get_device_capability(device))
    if device.type == "mps":
        return mps_support(_apple_chip(), _macos_version())
    return unknown_support(device.type)


def cpu_support(flags: frozenset[str]) -> SupportTable:
    """Support of a CPU with these feature flags, in the spelling of Linux or of `torch.cpu.get_capabilities`."""
    bf16 = _found(flags, ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16", "svebf16"))
    fp16 = _found(flags, ("amx_fp16", "avx512_fp16", "asimdhp", "fp16_arith"))
    return _table(
        fp32=_native("every CPU"),
        tf32=_absent("not used on a CPU"),
        bf16=_native(bf16) if bf16 else _emulated("no amx_bf16, avx512_bf16 or Arm bf16 among the CPU's flags"),
        fp16=_native(fp16) if fp16 else _emulated("no amx_fp16, avx512_fp16 or Arm fp16 among the CPU's flags"),
    )


def cuda_support(capability: tuple[int, int], *, bf16_native: bool) -> SupportTable:
    """Support of an NVIDIA GPU.

    Args:
        capability: compute capability, for example (9, 0).
        bf16_native: what torch says with emulation left out.
    """
    told = f"compute capability {capability[0]}.{capability[1]}"
    fast_fp16 = capability >= TENSOR_CORES or capability in FULL_RATE_FP16_BEFORE_TENSOR_CORES
    return _table(
        fp32=_native(told),
        tf32=_native(told) if capability >= AMPERE else _absent(f"{told}, it needs 8.0"),
        bf16=_native(told) if bf16_native else _emulated(f"{told}, it needs 8.0"),
        fp16=_native(told) if fast_fp16 else _emulated(f"{told}, it needs 7.0"),
    )


def rocm_support(architecture: str) -> SupportTable:
    """Support of an AMD GPU under ROCm: BF16 and FP16 on all that torch runs on, and no TF32 through torch."""
    native = _native(f"ROCm, {architecture}")
    return _table(fp32=native, bf16=native, fp16=native, tf32=_absent("ROCm, which takes no TF32 from torch"))


def xpu_support(capability: Mapping[str, object]) -> SupportTable:
    """Support of an Intel GPU that states this capability."""
    bf16 = bool(capability.get("has_bfloat16_conversions"))
    fp16 = bool(capability.get("has_fp16"))
    systolic = bool(capability.get("has_subgroup_matrix_multiply_accumulate"))
    return _table(
        fp32=_native("every Intel GPU"),
        tf32=_native("matrix engine") if systolic else _absent("no matrix engine"),
        bf16=_native("has_bfloat16_conversions") if bf16 else _emulated("no has_bfloat16_conversions"),
        fp16=_native("has_fp16") if fp16 else _emulated("no has_fp16"),
    )


def mps_support(chip: str, macos: tuple[int, int]) -> SupportTable:
    """Support of an Apple GPU: the M1 family emulates BF16, and macOS before 14 has none."""
    told = f"{chip}, macOS {macos[0]}.{macos[1]}"
    bf16 = _emulated(f"{told}, it needs M2") if "M1" in chip else _native(told)
    return _table(
        fp32=_native(told),
        tf32=_absent("no Apple GPU has it"),
        bf16=bf16 if macos >= MACOS_WITH_BF16 else _absent(f"{told}, it needs macOS 14"),
        fp16=_native(told),
    )


def unknown_support(device_type: str) -> SupportTable:
    """Support of a device that halfstep knows nothing of: FP32, and nothing that was not seen."""
    unknown = _absent(f"not known for a device of type {device_type}")
    return _table(fp32=_native("assumed"), tf32=unknown, bf16=unknown, fp16=unknown)


def cpu_flags() -> frozenset[str]:
    """Feature flags of this CPU: what Linux lists, and what torch found by itself where it can tell."""
    return _linux_flags() | _torch_flags()


def _cuda_device_support(device: torch.device) -> SupportTable:
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return rocm_support(getattr(properties, "gcnArchName", properties.name))
    with torch.cuda.device(device):
        bf16_native = torch.cuda.is_bf16_supported(including_emulation=False)
    return cuda_support((properties.major, properties.minor), bf16_native=bf16_native)


def _linux_flags() -> frozenset[str]:
    """The x86 line is called "flags", the Arm line "Features"; all cores list the same."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    listed = (line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features")))
    return frozenset(next(listed, "").split())


def _torch_flags() -> frozenset[str]:
    told: Callable[[], Mapping[str, object]] = getattr(torch.cpu, "get_capabilities", dict)
    return frozenset(name for name, has in told().items() if has is True)


def _apple_chip() -> str:
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "Apple GPU"


def _macos_version() -> tuple[int, int]:
    major, minor = (*platform.mac_ver()[0].split("."), "0", "0")[:2]
    return int(major or 0), int(minor or 0)


def _found(flags: frozenset[str], wanted: tuple[str, ...]) -> str:
    return ", ".join(flag for flag in wanted if flag in flags)


def _table(*, fp32: DtypeSupport, tf32: DtypeSupport, bf16: DtypeSupport, fp16: DtypeSupport) -> SupportTable:
    return {Arithmetic.FP32: fp32, Arithmetic.TF32: tf32, Arithmetic.BF16: bf16, Arithmetic.FP16: fp16}


def _native(because: str) -> DtypeSupport:
    return DtypeSupport(support=Support.NATIVE, because=because)


def _emulated(because: str) -> DtypeSupport:
    return DtypeSupport(support=Support.EMULATED, because=because)


def _absent(because: str) -> DtypeSupport:
    return DtypeSupport(support=Support.ABSENT, because=because)
