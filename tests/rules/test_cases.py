"""Markdown cases: a heading, `fires: RULE ...` or `silent`, and a program."""

import re
from pathlib import Path

import pytest

from halfstep.cli.check import check_source
from halfstep.findings.registry import all_rules
from halfstep.imagine.source import Source
from halfstep.rules.settings import Settings

CASE = re.compile(r"^## (?P<title>.+?)\n\n(?P<want>fires: .+?|silent)\n\n```python\n(?P<code>.*?)\n```", re.S | re.M)
FILES = sorted((Path(__file__).parent / "cases").glob("*.md"))
CASES = [pytest.param(m["want"], m["code"], id=f"{f.stem}: {m['title']}") for f in FILES for m in CASE.finditer(f.read_text())]


@pytest.mark.parametrize(("want", "code"), CASES)
def test_case_is_judged_as_it_says(want: str, code: str) -> None:
    found = check_source(Source("case.py", code), all_rules(), Settings())
    severe = {f.rule for f in found if f.severity.value in ("error", "warning")}
    if want == "silent":
        assert severe == set()
    else:
        assert set(want.removeprefix("fires: ").split()) <= {f.rule for f in found}


def test_every_case_of_every_file_is_read() -> None:
    assert len(CASES) == sum(f.read_text().count("\n## ") for f in FILES)
