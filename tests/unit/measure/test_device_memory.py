import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from halfstep.measure import memory

CPU = torch.device("cpu")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux' /proc")
SIXTEEN_MIB = 16 * 2**20


def in_a_process_of_its_own(check: Callable[[], None]) -> None:
    """Run a check where no memory freed by other tests can be handed out again."""
    child = multiprocessing.get_context("spawn").Process(target=check)
    child.start()
    child.join(120)
    assert child.exitcode == 0


def resident_set_holds_a_new_tensor() -> None:
    before = memory.resident_bytes()
    tensor = torch.ones(SIXTEEN_MIB)
    after = memory.resident_bytes()
    assert before is not None
    assert after is not None
    assert after - before >= 0.9 * tensor.nbytes


def peak_remembers_what_was_freed_until_it_is_reset() -> None:
    torch.ones(SIXTEEN_MIB)
    high = memory.memory_use(CPU)
    assert memory.reset_peak(CPU)
    after = memory.memory_use(CPU)
    assert high.peak_allocated_bytes is not None
    assert after.peak_allocated_bytes is not None
    assert high.peak_allocated_bytes - after.peak_allocated_bytes > SIXTEEN_MIB


@linux_only
@pytest.mark.parametrize("check", [resident_set_holds_a_new_tensor, peak_remembers_what_was_freed_until_it_is_reset])
def test_resident_set_and_its_peak_are_told(check: Callable[[], None]) -> None:
    in_a_process_of_its_own(check)


def test_memory_of_the_cpu_is_its_resident_set() -> None:
    use = memory.memory_use(CPU)
    assert use.allocated_bytes == use.reserved_bytes
    assert use.peak_allocated_bytes is not None
    assert use.allocated_bytes is not None
    assert use.peak_allocated_bytes >= use.allocated_bytes > 2**20


@linux_only
def test_process_uses_less_than_the_machine_has() -> None:
    total, resident = memory.total_bytes(CPU), memory.resident_bytes()
    assert total is not None
    assert resident is not None
    assert resident < total


@linux_only
def test_a_container_with_less_than_the_machine_has_its_own_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("1048576\n")
    monkeypatch.setattr(memory, "CONTAINER_LIMIT", limit)
    assert memory.total_bytes(CPU) == 1048576


@linux_only
def test_a_container_without_a_limit_has_the_memory_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("max\n")
    monkeypatch.setattr(memory, "CONTAINER_LIMIT", limit)
    total = memory.total_bytes(CPU)
    assert total is not None
    assert total > 2**24


@linux_only
def test_without_proc_the_resident_set_is_unknown_and_the_peak_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_peak = memory.peak_resident_bytes()
    monkeypatch.setattr(memory, "PROCESS_STATUS", Path("/nowhere/status"))
    assert memory.resident_bytes() is None
    peak = memory.peak_resident_bytes()
    assert peak is not None
    assert kernel_peak is not None
    assert peak >= 0.99 * kernel_peak


def test_a_peak_that_cannot_be_reset_is_said_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CLEAR_REFS", Path("/nowhere/clear_refs"))
    assert memory.reset_peak(CPU) is False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_of_a_gpu_counts_its_tensors() -> None:
    device = torch.device("cuda", 0)
    before = memory.memory_use(device)
    memory.reset_peak(device)
    tensor = torch.ones(SIXTEEN_MIB, device=device)
    during = memory.memory_use(device)
    assert during.allocated_bytes is not None
    assert before.allocated_bytes is not None
    assert during.allocated_bytes - before.allocated_bytes >= tensor.nbytes
    assert during.peak_allocated_bytes is not None
    assert during.peak_allocated_bytes >= during.allocated_bytes
    total = memory.total_bytes(device)
    assert total is not None
    assert total > during.allocated_bytes
