from pathlib import Path

import pytest
import torch

from halfstep.measure import dtypes
from halfstep.measure.dtypes import (
    Arithmetic,
    Support,
    SupportTable,
    cpu_support,
    cuda_support,
    mps_support,
    rocm_support,
    unknown_support,
    xpu_support,
)

XMX = {"has_bfloat16_conversions": True, "has_fp16": True, "has_subgroup_matrix_multiply_accumulate": True}

# name, table, and its TF32, BF16 and FP16 by first letter: native, emulated, absent
KNOWN: list[tuple[str, SupportTable, str]] = [
    ("x86 with AVX2", cpu_support(frozenset({"avx2"})), "aee"),
    ("x86 with AVX512-BF16", cpu_support(frozenset({"avx512_bf16"})), "ane"),
    ("x86 with AMX", cpu_support(frozenset({"amx_bf16", "avx512_bf16", "avx512_fp16"})), "ann"),
    ("Arm with BF16 and FP16", cpu_support(frozenset({"asimdhp", "bf16"})), "ann"),
    ("Maxwell GTX 980", cuda_support((5, 2), bf16_native=False), "aee"),
    ("Pascal P100", cuda_support((6, 0), bf16_native=False), "aen"),
    ("Pascal GTX 1080, whose FP16 runs at 1/64", cuda_support((6, 1), bf16_native=False), "aee"),
    ("V100", cuda_support((7, 0), bf16_native=False), "aen"),
    ("T4", cuda_support((7, 5), bf16_native=False), "aen"),
    ("A100", cuda_support((8, 0), bf16_native=True), "nnn"),
    ("H100", cuda_support((9, 0), bf16_native=True), "nnn"),
    ("MI300X", rocm_support("gfx942"), "ann"),
    ("Intel GPU with a matrix engine", xpu_support(XMX), "nnn"),
    ("Intel GPU that says nothing", xpu_support({}), "aee"),
    ("M1", mps_support("Apple M1 Max", (15, 0)), "aen"),
    ("M3", mps_support("Apple M3", (15, 0)), "ann"),
    ("M3 on macOS 13", mps_support("Apple M3", (13, 6)), "aan"),
    ("unheard of", unknown_support("foo"), "aaa"),
]


@pytest.mark.parametrize(("table", "expected"), [pytest.param(*row[1:], id=row[0]) for row in KNOWN])
def test_known_device_has_these_formats(table: SupportTable, expected: str) -> None:
    formats = (Arithmetic.TF32, Arithmetic.BF16, Arithmetic.FP16)
    assert "".join(table[name].support.value[0] for name in formats) == expected
    assert table[Arithmetic.FP32].native


@pytest.mark.parametrize("table", [pytest.param(row[1], id=row[0]) for row in KNOWN])
def test_every_answer_says_what_told_so(table: SupportTable) -> None:
    assert set(table) == set(Arithmetic)
    assert all(told.because for told in table.values())


def test_a_missing_format_says_what_it_needs() -> None:
    assert cuda_support((7, 5), bf16_native=False)[Arithmetic.BF16] == dtypes.DtypeSupport(
        support=Support.EMULATED, because="compute capability 7.5, it needs 8.0"
    )


@pytest.mark.parametrize("line", ["flags\t\t: fpu avx512_bf16 sse\n", "Features\t: fp asimd avx512_bf16\n"])
def test_flags_are_read_from_x86_and_arm_spellings(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(f"processor\t: 0\n{line}\nprocessor\t: 1\n")
    monkeypatch.setattr(dtypes, "CPU_INFO", cpu_info)
    assert "avx512_bf16" in dtypes.cpu_flags()


def test_without_proc_the_flags_are_what_torch_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "CPU_INFO", Path("/nowhere/cpuinfo"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True, "avx2": False}, raising=False)
    assert dtypes.cpu_flags() == {"amx_bf16"}


def test_this_cpu_is_asked_for_real() -> None:
    assert dtypes.dtype_support(torch.device("cpu")) == cpu_support(dtypes.cpu_flags())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_bf16_of_a_gpu_is_native_only_without_emulation() -> None:
    told = dtypes.dtype_support(torch.device("cuda", 0))
    assert told[Arithmetic.BF16].native is torch.cuda.is_bf16_supported(including_emulation=False)
