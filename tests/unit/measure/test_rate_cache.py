import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from halfstep.measure import rate_cache
from halfstep.measure.cache_folder import cache_dir
from halfstep.measure.dtypes import Arithmetic
from halfstep.measure.rate_cache import keep_rates, known_or_measured_rates, known_rates
from halfstep.measure.stats import summarize

CPU = torch.device("cpu")
RATES = {
    Arithmetic.FP32: summarize([0.17, 0.18, 0.19], "TFLOP/s"),
    Arithmetic.BF16: summarize([0.41, 0.42, 0.40], "TFLOP/s"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "halfstep"


def the_file(cache: Path) -> Path:
    (file,) = cache.rglob("*.json")
    return file


def test_kept_rates_come_back_equal(cache: Path) -> None:
    keep_rates(CPU, RATES)
    assert known_rates(CPU) == RATES
    assert [path.suffix for path in cache.rglob("*") if path.is_file()] == [".json"]


def test_nothing_is_known_at_first_and_asking_creates_nothing(cache: Path) -> None:
    assert known_rates(CPU) is None
    assert not cache.exists()


def test_measured_once_then_read(monkeypatch: pytest.MonkeyPatch) -> None:
    first = known_or_measured_rates(CPU, budget_s=0.01)
    monkeypatch.setattr(rate_cache, "matmul_rates", lambda *args, **kwargs: pytest.fail("measured again"))
    assert known_or_measured_rates(CPU) == first


def test_refresh_measures_again_and_keeps_the_new_rates() -> None:
    keep_rates(CPU, RATES)
    fresh = known_or_measured_rates(CPU, refresh=True, budget_s=0.01)
    assert fresh != RATES
    assert known_rates(CPU) == fresh


def edited(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        record = json.loads(text)
        change(record)
        return json.dumps(record)

    return edit


DAMAGE: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut short": lambda text: text[: len(text) // 2],
    "not an object": lambda text: "[1, 2]",
    "rates of no kind": edited(lambda record: record.update(rates=[])),
    "no rates": edited(lambda record: record.update(rates={})),
    "an unknown format": edited(lambda record: record["rates"].update(fp4=record["rates"]["fp32"])),
    "a field missing": edited(lambda record: record["rates"]["fp32"].pop("low")),  # type: ignore[attr-defined]
    "a rate of zero": edited(lambda record: record["rates"]["fp32"].update(low=0.0)),  # type: ignore[attr-defined]
    "a rate that is text": edited(lambda record: record["rates"]["fp32"].update(value="1")),  # type: ignore[attr-defined]
    "another unit": edited(lambda record: record["rates"]["fp32"].update(unit="GFLOP/s")),  # type: ignore[attr-defined]
    "another device": edited(lambda record: record["key"].update(device="abacus")),
}


@pytest.mark.parametrize("damage", [pytest.param(edit, id=name) for name, edit in DAMAGE.items()])
def test_a_damaged_file_is_ignored_and_rewritten(
    damage: Callable[[str], str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_rates(CPU, RATES)
    file = the_file(cache)
    file.write_text(damage(file.read_text()))
    assert known_rates(CPU) is None
    fresh = {Arithmetic.FP32: summarize([0.2], "TFLOP/s")}
    monkeypatch.setattr(rate_cache, "matmul_rates", lambda *args, **kwargs: fresh)
    assert known_or_measured_rates(CPU) == known_rates(CPU) == fresh


def test_a_file_that_is_not_text_is_ignored(cache: Path) -> None:
    keep_rates(CPU, RATES)
    the_file(cache).write_bytes(b"\xff\xfe\x00")
    assert known_rates(CPU) is None


def test_another_torch_or_number_of_threads_has_rates_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_rates(CPU, RATES)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    assert known_rates(CPU) is None
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert known_rates(CPU) is None


def test_a_cache_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert known_or_measured_rates(CPU, budget_s=0.01)
    assert known_rates(CPU) is None


def test_a_write_that_breaks_leaves_the_old_rates_and_no_litter(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_rates(CPU, RATES)

    def full_disk(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rate_cache.os, "replace", full_disk)
    keep_rates(CPU, {Arithmetic.FP32: RATES[Arithmetic.FP32]})
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    assert known_rates(CPU) == RATES
    assert len([path for path in cache.rglob("*") if path.is_file()]) == 1


def test_a_relative_cache_home_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/cache")
    assert cache_dir().is_absolute()


def test_a_user_without_a_home_measures_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(rate_cache.Path, "home", homeless)
    assert known_or_measured_rates(CPU, budget_s=0.01)
