import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.cli.main import main
from halfstep.config.options import Precision
from halfstep.measure import rate_cache
from halfstep.measure.dtypes import Arithmetic, dtype_support
from halfstep.measure.hardware import devices
from halfstep.measure.stats import summarize
from halfstep.precision.select import explain_without_model

CPU = torch.device("cpu")
RATES = {
    Arithmetic.FP32: summarize([0.17, 0.18, 0.16], "TFLOP/s"),
    Arithmetic.BF16: summarize([0.41, 0.42, 0.40], "TFLOP/s"),
    Arithmetic.FP16: summarize([0.0017, 0.0018, 0.0016], "TFLOP/s"),
}


@pytest.fixture(autouse=True)
def one_cpu_and_a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("halfstep.measure.hardware.devices", lambda: [CPU])


def environment(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["env", "--format", "json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_describes_the_machine_and_every_device(capsys: pytest.CaptureFixture[str]) -> None:
    found = environment(capsys, "--no-measure")
    assert found["torch"] == torch.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert ("gloo" in found["distributed"]) is torch.distributed.is_gloo_available()
    (cpu,) = found["devices"]
    assert (cpu["device"], cpu["backend"], cpu["driver"]) == ("cpu", "CPU", "none")
    assert cpu["threads"] == torch.get_num_threads()


def test_every_format_and_precision_has_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    (cpu,) = environment(capsys, "--no-measure")["devices"]
    support = {str(name): (str(told.support), told.because) for name, told in dtype_support(CPU).items()}
    assert {row["name"]: (row["support"], row["because"]) for row in cpu["formats"]} == support
    assert set(cpu["precisions"]) == {str(precision) for precision in Precision}
    assert all(answer["reason"] for answer in (*cpu["precisions"].values(), cpu["auto"]))


def test_without_measuring_unknown_rates_are_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    (cpu,) = environment(capsys, "--no-measure")["devices"]
    assert cpu["rates"] == "not measured"
    assert all(row["rate"] is None for row in cpu["formats"])
    assert main(["env", "--no-measure"]) == 0
    assert "unknown" in capsys.readouterr().out


def test_without_measuring_known_rates_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rate_cache.keep_rates(CPU, RATES)
    (cpu,) = environment(capsys, "--no-measure")["devices"]
    assert cpu["rates"] == "measured before on this machine"
    assert {row["name"]: row["rate"]["value"] for row in cpu["formats"] if row["rate"]} == {
        "fp32": 0.17,
        "bf16": 0.41,
        "fp16": 0.0017,
    }


def test_a_new_machine_is_measured_once_and_again_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[torch.device] = []

    def quickly(device: torch.device, *, budget_s: float) -> rate_cache.Rates:
        measured.append(device)
        return RATES

    monkeypatch.setattr(rate_cache, "matmul_rates", quickly)
    rates = [environment(capsys, *extra)["devices"][0]["rates"] for extra in ([], [], ["--refresh"])]
    assert rates == ["measured now", "measured before on this machine", "measured now"]
    assert measured == [CPU, CPU]


def test_auto_is_what_the_matmul_rates_say(capsys: pytest.CaptureFixture[str]) -> None:
    rate_cache.keep_rates(CPU, RATES)
    (cpu,) = environment(capsys)["devices"]
    choice = explain_without_model(CPU, rates=RATES)
    assert cpu["auto"] == {"value": str(choice.value), "reason": choice.reason}


def test_text_shows_rates_with_spread_and_how_much_slower_fp16_is(capsys: pytest.CaptureFixture[str]) -> None:
    rate_cache.keep_rates(CPU, RATES)
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    for told in (
        "0.170 TFLOP/s (0.160 to 0.180, 3 runs)",
        "2.41 times",
        "0.00170 TFLOP/s (0.00160 to 0.00180, 3 runs)",
        "100 times slower",
        "GiB",
        "torch.compile",
        "precision = auto",
    ):
        assert told in text
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_every_device_of_the_machine_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.measure.hardware.devices", lambda: [torch.device("cpu", 0), CPU])
    assert [device["device"] for device in environment(capsys, "--no-measure")["devices"]] == ["cpu:0", "cpu"]


def test_measuring_and_not_measuring_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["env", "--no-measure", "--refresh"])
    assert ended.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys; from halfstep.cli.main import main\n"
        "try: main(['env', '--help'])\n"
        "except SystemExit as ended: sys.exit(ended.code or ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--no-measure" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_shown_with_its_driver_and_rates(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.measure.hardware.devices", devices)
    gpu = environment(capsys)["devices"][0]
    assert gpu["backend"] in ("CUDA", "ROCm")
    assert gpu["driver"] != "unknown"
    assert any(row["rate"] for row in gpu["formats"])
