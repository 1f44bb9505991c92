"""The four formats of one finding, by their whole text."""

import json

from halfstep.findings.finding import Edit, Finding, Fix, Safety, Severity
from halfstep.report.github import to_github
from halfstep.report.json import to_json
from halfstep.report.sarif import to_sarif
from halfstep.report.text import one, summary

SOURCE = "loss.backward()\nclip(model)\noptimizer.step()\n"
FIX = Fix((Edit(2, 0, 2, 0, "scaler.unscale_(optimizer)\n"),), Safety.SAFE)
FINDING = Finding(
    rule="amp-clip-before-unscale",
    code="HS101",
    severity=Severity.ERROR,
    path="a,b.py",
    line=2,
    column=1,
    end_line=2,
    end_column=12,
    message="clipped at 100%",
    world="when `amp` is true",
    why="Too small.",
    fix=FIX,
)


def test_text_shows_place_source_caret_world_reason_and_fix() -> None:
    assert one(FINDING, SOURCE) == (
        "HS101 error: clipped at 100% [amp-clip-before-unscale]\n"
        "  --> a,b.py:2:1\n"
        "  |\n"
        "1 | loss.backward()\n"
        "2 | clip(model)\n"
        "  | ^^^^^^^^^^^\n"
        "3 | optimizer.step()\n"
        "  holds when `amp` is true\n"
        "  why: Too small.\n"
        "  fix (--fix applies it):\n"
        "    @@ -1,2 +1,3 @@\n"
        "     loss.backward()\n"
        "    +scaler.unscale_(optimizer)\n"
        "     clip(model)"
    )


def test_text_of_a_line_that_is_not_there_has_no_excerpt() -> None:
    bare = Finding(rule="r", code="HS1", severity=Severity.INFO, path="a.py", line=9, column=1, message="m")
    assert one(bare, SOURCE) == "HS1 info: m [r]\n  --> a.py:9:1"


def test_summary_counts_in_words() -> None:
    assert summary(1, 1, 1) == "1 finding in 1 file, 1 with a fix."
    assert summary(2, 3, 0) == "2 findings in 3 files."
    assert summary(0, 2, 0) == "No findings in 2 files."


def test_json_counts_columns_from_one_in_fixes_too() -> None:
    (told,) = json.loads(to_json([FINDING]))["findings"]
    assert (told["rule"], told["severity"], told["line"], told["world"]) == (
        "amp-clip-before-unscale",
        "error",
        2,
        "when `amp` is true",
    )
    assert told["fix"]["edits"] == [
        {"line": 2, "column": 1, "end_line": 2, "end_column": 1, "text": "scaler.unscale_(optimizer)\n"}
    ]


def test_github_escapes_what_its_commands_mean() -> None:
    assert to_github([FINDING]) == (
        "::error file=a%2Cb.py,line=2,col=1,title=amp-clip-before-unscale::HS101 clipped at 100%25 (when `amp` is true)\n"
    )


def test_sarif_holds_the_rules_that_were_found_and_no_others() -> None:
    (run,) = json.loads(to_sarif([FINDING]))["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["HS101"]
    (result,) = run["results"]
    assert (result["ruleId"], result["level"]) == ("HS101", "error")
