from pathlib import Path

import pytest
import torch

from halfstep.measure import hardware
from halfstep.measure.hardware import Backend, describe, devices

CPU = torch.device("cpu")


def test_the_cpu_is_always_the_last_device() -> None:
    assert devices()[-1] == CPU


def test_the_cpu_is_described_with_name_memory_cores_and_versions() -> None:
    cpu = describe(CPU)
    assert (cpu.backend, cpu.driver, cpu.threads) == (Backend.CPU, "none", torch.get_num_threads())
    assert cpu.name
    assert cpu.cores == hardware.usable_cores() >= 1
    assert cpu.memory_bytes is None or cpu.memory_bytes > 2**20
    assert cpu.versions["instructions"] == torch.backends.cpu.get_cpu_capability()


@pytest.mark.parametrize(("hip", "backend"), [(None, Backend.CUDA), ("6.4", Backend.ROCM)])
def test_rocm_is_told_from_cuda(hip: str | None, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    assert hardware.backend_of(torch.device("cuda", 0)) is backend


@pytest.mark.parametrize(("kind", "backend"), [("xpu", Backend.XPU), ("mps", Backend.MPS), ("meta", Backend.OTHER)])
def test_other_accelerators_are_told_apart(kind: str, backend: Backend) -> None:
    assert hardware.backend_of(torch.device(kind)) is backend


def test_every_backend_has_a_driver_and_versions() -> None:
    assert set(hardware.DRIVERS) == set(hardware.VERSIONS) == set(Backend)


def test_nvidia_driver_is_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "version"
    told.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\nGCC version: 13.3.0\n")
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", told)
    assert hardware.DRIVERS[Backend.CUDA](torch.device("cuda", 0)) == "570.86.15"


def test_a_driver_that_does_not_tell_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", tmp_path / "missing")
    monkeypatch.setattr(hardware, "AMD_DRIVER", tmp_path / "missing")
    monkeypatch.setenv("PATH", str(tmp_path))
    cuda = torch.device("cuda", 0)
    assert [hardware.DRIVERS[kind](cuda) for kind in (Backend.CUDA, Backend.ROCM, Backend.OTHER)] == ["unknown"] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_described_with_name_driver_memory_and_cores() -> None:
    device = devices()[0]
    gpu = describe(device)
    assert gpu.name == torch.cuda.get_device_name(device)
    assert gpu.driver != "unknown"
    assert gpu.memory_bytes == torch.cuda.get_device_properties(device).total_memory
    assert gpu.cores is not None
    assert gpu.threads is None
