from dataclasses import replace
from pathlib import Path

import pytest

from halfstep.config.options import Precision
from halfstep.errors import DeviceError
from halfstep.plan.calibration import FOLDER, Calibration, keep, kept
from halfstep.plan.known_models import KNOWN
from halfstep.plan.machines import measured
from halfstep.plan.model_facts import from_config
from halfstep.plan.recipe import Recipe
from halfstep.plan.search import Wish, search

CPU = Calibration(
    device="a CPU",
    torch="2.13.0",
    threads=2,
    memory_bytes=24 * 2**30,
    matmul_tflops={"fp32": 0.2, "bf16": 0.4},
    efficiency={"fp32": 0.8, "bf16": 0.5},
    convolutions=0.5,
    bandwidth_gbs=10.0,
    launch_us=5.0,
    measured="2026-11-29",
)
FP32 = Recipe(micro_batch=1, sequence=128, precision=Precision.FP32)


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    assert kept(tmp_path) is None
    assert keep(CPU, tmp_path).parent == tmp_path / FOLDER
    assert kept(tmp_path) == CPU


def test_a_new_one_of_the_same_device_takes_the_place_of_the_old(tmp_path: Path) -> None:
    newer = replace(CPU, bandwidth_gbs=12.0)
    assert keep(CPU, tmp_path) == keep(newer, tmp_path)
    assert kept(tmp_path) == newer
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"device": "a CPU"}'])
def test_a_damaged_file_is_passed_over(text: str, tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "damaged.json").write_text(text)
    assert kept(tmp_path) is None


def test_rates_are_what_products_of_a_model_reached() -> None:
    rates = CPU.rates(FP32)
    assert rates is not None
    assert (rates.matmul, rates.bandwidth, rates.launch_s) == pytest.approx((0.16e12, 10e9, 5e-6))
    assert CPU.rates(replace(FP32, precision=Precision.FP16)) is None


def test_a_measured_machine_is_planned_for_in_what_was_measured_the_fastest_first() -> None:
    machine = measured(CPU, 1, None)
    assert machine.precisions == (Precision.BF16, Precision.FP32)
    plans = search(from_config(KNOWN["gpt2"], "gpt2"), machine, Wish(sequence=128, global_batch=4))
    assert {plan.recipe.precision for plan in plans} == {Precision.BF16, Precision.FP32}
    with pytest.raises(DeviceError) as error:
        machine.rates(replace(FP32, precision=Precision.FP16))
    assert str(error.value) == "fp16 was not measured on a CPU. Measured were fp32, bf16."
