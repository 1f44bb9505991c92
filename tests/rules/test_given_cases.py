"""Scores the cases that lie beside the repository, where they do."""

import csv
from pathlib import Path

import pytest

from halfstep.cli.check import check_source
from halfstep.findings.registry import all_rules
from halfstep.imagine.source import read
from halfstep.rules.settings import Settings

CASES = Path(__file__).parents[3] / "shared" / "cases"
pytestmark = pytest.mark.skipif(not CASES.exists(), reason="the cases lie beside the repository only where they were written")
LOG = (CASES / "log.tsv").read_text() if CASES.exists() else ""
ROWS = list(csv.DictReader(LOG.splitlines(), delimiter="\t"))
FAULTY = [r for r in ROWS if r["kind"] == "faulty" and "static" in r["detect_by"]]
CLEAN = [r for r in ROWS if r["kind"] == "clean"]


def _found(row: dict[str, str]) -> list[tuple[str, str]]:
    path = CASES / row["file"]
    lines = path.read_text().splitlines()
    end = next((n for n, text in enumerate(lines, 1) if text.strip().startswith("# --- evidence ---")), len(lines) + 1)
    source = read(path, forced=True)
    assert source is not None
    return [(f.rule, f.severity.value) for f in check_source(source, all_rules(), Settings()) if f.line < end]


@pytest.mark.parametrize("row", FAULTY, ids=lambda row: row["file"])
def test_faulty_script_shows_its_fault_and_nothing_else(row: dict[str, str]) -> None:
    wanted = {k.strip() for k in row["fault_kinds"].split(",")}
    allowed = wanted | {k.strip() for k in row["also_acceptable"].split(",")}
    found = _found(row)
    assert wanted <= {rule for rule, _ in found}
    assert {rule for rule, severity in found if severity in ("error", "warning")} <= allowed


@pytest.mark.parametrize("row", CLEAN, ids=lambda row: row["file"])
def test_clean_script_is_silent(row: dict[str, str]) -> None:
    assert [rule for rule, severity in _found(row) if severity in ("error", "warning")] == []
