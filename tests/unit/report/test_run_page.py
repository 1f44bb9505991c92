"""The page of a run says what its folder says: no more, and nothing less."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from halfstep.cli.main import main
from halfstep.errors import DataError
from halfstep.report.run_page import MOST_POINTS, _points, run_page
from halfstep.report.runs import read_run


def update(index: int, **values: Any) -> dict[str, Any]:
    usual = {"kind": "update", "index": index, "applied": index, "cause": None, "detail": "", "loss": 1 / index, "grad_norm": 2.0}
    return {**usual, "scale": 1.0, "lr": 0.1, "tokens_per_s": 1000.0, "memory_bytes": 2_000_000_000, **values}


SUMMARY = {
    "because": "3 updates were applied",
    "skipped": {"overflow": 1},
    "rate": {"median": 1000.0, "low": 900.0, "high": 1100.0, "updates": 3},
    "final": {"loss": 0.75},
    "best": {"loss": 0.5},
    "wall_s": 12.0,
    "peak_memory_bytes": 2_500_000_000,
    "unit": "tokens",
}
RECORD = {
    "status": "finished",
    "planned_updates": 3,
    "config": {"precision": "fp16", "processes": 2, "batch": {"global": 8}},
    "choices": {"batch.micro": {"value": 4, "reason": "at most <4> fit"}},
    "engine": {"finish": {"value": "in the kernel", "reason": "AdamW is fused"}},
    "summary": SUMMARY,
}
LOG = [
    update(1, scale=65536.0),
    update(2, scale=65536.0, applied=1, cause="overflow", detail="", loss=None, grad_norm=None),
    update(3, scale=32768.0, applied=2),
    {"kind": "evaluation", "update": 3, "loss": 0.75, "best": True},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "run", RECORD, LOG)


def written(folder: Path, record: Any, log: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    return folder


def words(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", "", html, flags=re.S)))


def test_a_run_is_told_at_a_glance_with_every_choice(folder: Path) -> None:
    html = run_page([read_run(folder)])
    said = words(html)
    assert "Finished: 3 updates were applied." in said
    assert "2 of 3" in said
    assert "tokens/s, median (900 to 1,100 in 3 updates) 1,000" in said
    assert "2.50 GB" in said
    assert "batch.micro 4 at most &lt;4&gt; fit" in said
    assert "engine.finish in the kernel AdamW is fused" in said
    assert "skipped update (1)" in said
    assert "http" not in re.sub(r"http://www.w3.org/\S+", "", html), "nothing is fetched"


def test_a_loss_that_was_not_finite_is_shown_as_nan(folder: Path) -> None:
    html = run_page([read_run(folder)])
    assert "1 not finite" in words(html)
    assert ">NaN<" in html


def test_the_contract_of_fp16_on_two_ranks(folder: Path) -> None:
    said = words(run_page([read_run(folder)]))
    assert "FP32 FP16 under autocast, loss scaled FP32 FP32 the parameters themselves" in said


@pytest.mark.parametrize(
    ("precision", "row"),
    [
        ("bf16", "FP32 BF16 under autocast FP32 one process: nothing to reduce the parameters themselves"),
        ("bf16-pure", "BF16 BF16 BF16 one process: nothing to reduce none: BF16 parameters are updated as they are"),
        ("later", "unknown unknown unknown unknown unknown"),
    ],
)
def test_the_contract_of_other_precisions(tmp_path: Path, precision: str, row: str) -> None:
    run = written(tmp_path / "run", {**RECORD, "config": {"precision": precision, "processes": 1}}, LOG)
    assert row in words(run_page([read_run(run)]))


def test_several_runs_stand_side_by_side(folder: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "other", {"status": "running", "config": {"precision": "bf16"}}, LOG[:1])
    said = words(run_page([read_run(folder), read_run(other)]))
    assert f"The lowest held-out loss is 0.5, of {folder}." in said
    assert "precision fp16 bf16" in said
    assert "memory 2.50 GB unknown" in said
    assert "ended finished running" in said


def test_a_failed_run_says_its_error(tmp_path: Path) -> None:
    run = written(tmp_path / "run", {"status": "failed", "error": "out of memory", "config": {}}, [])
    assert "Failed: out of memory." in words(run_page([read_run(run)]))


def test_very_long_lines_are_thinned_and_keep_what_is_not_finite() -> None:
    updates = [{"index": n, "loss": float("nan") if n == 777 else float(n)} for n in range(10_001)]
    points = _points(updates, "loss")
    assert len(points) <= MOST_POINTS + 2
    assert points[-1] == (10_000.0, 10_000.0)
    assert [x for x, y in points if y != y] == [777.0]


def test_a_line_that_is_being_written_is_left_out(folder: Path) -> None:
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"kind": "upd')
    assert len(read_run(folder).updates) == 3


def test_the_command_writes_the_page_and_says_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}/report.html\n"
    assert "<!doctype html>" in (folder / "report.html").read_text()


def test_bad_folders_are_refused_in_a_sentence(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as error:
        read_run(tmp_path / "none")
    assert str(error.value) == f"{tmp_path}/none is no folder. Give the folder of a run, as `halfstep train` names it at its end."
    with pytest.raises(DataError) as error:
        read_run(tmp_path / "empty")
    assert str(error.value) == f"{tmp_path}/empty holds no run: there is no run.json in it."
    (folder / "log.jsonl").write_text("{}\n{\n{}\n")
    with pytest.raises(DataError) as error:
        read_run(folder)
    assert str(error.value) == f"{folder}/log.jsonl, line 2 is not JSON: the log is damaged."
    (folder / "run.json").write_text("[]")
    with pytest.raises(DataError) as error:
        read_run(folder)
    assert str(error.value) == f"{folder}/run.json is not what `halfstep train` writes: it has no `config`."
