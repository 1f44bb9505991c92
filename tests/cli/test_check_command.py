import ast
import io
import json
import sys
from pathlib import Path

import pytest

from halfstep.cli.main import main
from halfstep.events.trace import Story
from halfstep.findings.registry import find_rule
from halfstep.imagine.story import tell

BAD = find_rule("amp-clip-before-unscale").card.example
GOOD = find_rule("amp-clip-before-unscale").card.instead


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(BAD)
    return path


def _json(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return list(json.loads(capsys.readouterr().out)["findings"])


def test_findings_exit_1_and_their_absence_exits_0(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(script)]) == 1
    script.write_text(GOOD)
    assert main(["check", str(script)]) == 0
    assert "No findings in 1 file." in capsys.readouterr().out


def test_missing_path_exits_2_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "none.py")]) == 2
    assert "none.py does not exist. Give a file, a folder, or `-` for standard input." in capsys.readouterr().err


def test_unknown_rule_exits_2_with_a_sentence(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--select", "no-such", str(script)]) == 2
    expected = "halfstep: `no-such` is no rule's name or code. `halfstep explain --all` lists them.\n"
    assert capsys.readouterr().err == expected


def test_json_holds_the_whole_contract(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "--format", "json", str(script)])
    (finding,) = _json(capsys)
    line = BAD.splitlines().index("            nn.utils.clip_grad_norm_(model.parameters(), 1.0)") + 1
    assert (finding["rule"], finding["code"], finding["severity"]) == ("amp-clip-before-unscale", "HS101", "error")
    assert (finding["path"], finding["line"], finding["column"]) == (str(script), line, 13)
    assert finding["world"] is None
    assert finding["fix"]["edits"][0]["text"] == "            scaler.unscale_(optimizer)\n"  # type: ignore[index]


def test_text_shows_place_caret_reason_and_fix(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", str(script)])
    out = capsys.readouterr().out
    assert f"--> {script}:" in out
    assert "^^^^" in out
    assert "why: " in out
    assert "+            scaler.unscale_(optimizer)" in out


def test_fix_changes_the_file_and_only_once(script: Path) -> None:
    assert main(["check", "--unsafe-fixes", str(script)]) == 0
    assert script.read_text() == GOOD
    assert main(["check", "--unsafe-fixes", str(script)]) == 0
    assert script.read_text() == GOOD


def test_diff_shows_the_fix_and_changes_nothing(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--diff", "--unsafe-fixes", str(script)]) == 1
    assert "+            scaler.unscale_(optimizer)" in capsys.readouterr().out
    assert script.read_text() == BAD


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("amp-clip-before-unscale", "1 fix changes the numbers and needs `--unsafe-fixes`."),
        ("amp-closure-scaler", "no fix for 1 finding."),
    ],
)
def test_diff_without_a_safe_fix_says_so(rule: str, said: str, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(find_rule(rule).card.example)
    assert main(["check", "--diff", str(script)]) == 1
    written = capsys.readouterr()
    assert (written.out, written.err) == ("", f"Nothing would change: {said}\n")


def test_fix_keeps_byte_order_mark_and_line_ends(script: Path) -> None:
    script.write_bytes(b"\xef\xbb\xbf" + BAD.replace("\n", "\r\n").encode())
    assert main(["check", "--unsafe-fixes", str(script)]) == 0
    assert script.read_bytes() == b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode()


def test_file_that_would_lose_letters_is_not_fixed(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = b"# -*- coding: latin-1 -*-\n# caf\xe9\n" + BAD.encode()
    script.write_bytes(raw)
    assert main(["check", "--unsafe-fixes", str(script)]) == 1
    assert script.read_bytes() == raw
    said = f"halfstep: {script} is not in UTF-8 and would lose letters: it is left as it is. Save it in UTF-8.\n"
    assert capsys.readouterr().err == said


def test_column_counts_characters(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(BAD.replace("nn.utils.clip", 'été = "é"; nn.utils.clip'), encoding="utf-8")
    main(["check", "--format", "json", str(script)])
    assert [(f["column"], f["end_column"]) for f in _json(capsys)] == [(24, 73)]


@pytest.mark.parametrize("body", ["loss.backward()", "pass"])
def test_named_file_that_is_not_python_exits_2_and_the_others_are_reported(
    body: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = script.parent / "broken.py"
    broken.write_text(f"def (:\n    {body}\n")
    assert main(["check", "--format", "github", str(script), str(broken)]) == 2
    written = capsys.readouterr()
    assert written.out.startswith("::error file=")
    assert written.err == f"halfstep: {broken} is not Python that can be read (line 1: invalid syntax).\n"
    assert main(["check", str(script.parent)]) == 1


def test_a_fault_of_the_checker_itself_leaves_the_answer_for_the_other_files(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = script.with_name("odd.py")
    odd.write_text(GOOD)

    def broken(tree: ast.Module, path: str) -> Story:
        if path.endswith("odd.py"):
            raise KeyError("lost")
        return tell(tree, path)

    monkeypatch.setattr("halfstep.cli.check.tell", broken)
    assert main(["check", str(script.parent)]) == 2
    told = capsys.readouterr()
    assert "amp-clip-before-unscale" in told.out
    assert told.err.startswith(
        f"halfstep: {odd} was not checked: halfstep itself failed (KeyError: 'lost'; test_check_command.py,"
    )


def test_standard_input_cannot_be_fixed_but_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--unsafe-fixes", "-"]) == 2
    said = "halfstep: standard input has no file that could be fixed. Add `--diff` to see what would change.\n"
    assert capsys.readouterr().err == said
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BAD.encode())))
    assert main(["check", "--unsafe-fixes", "--diff", "-"]) == 1
    assert "+            scaler.unscale_(optimizer)" in capsys.readouterr().out


def test_unsafe_fix_needs_its_own_option(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(find_rule("grad-zero-missing").card.example)
    assert main(["check", "--fix", str(path)]) == 1
    assert main(["check", "--unsafe-fixes", str(path)]) == 0


def test_comment_suppresses_and_an_unused_one_is_reported(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marked = BAD.replace("1.0)", "1.0)  # halfstep: ignore[amp-clip-before-unscale]")
    script.write_text(marked)
    assert main(["check", str(script)]) == 0
    capsys.readouterr()
    script.write_text(marked.replace("scaler.step(", "scaler.step(  # halfstep: ignore[HS102]\n                "))
    assert main(["check", "--format", "json", str(script)]) == 1
    assert [f["rule"] for f in _json(capsys)] == ["unused-ignore"]


def test_settings_are_read_from_pyproject(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = script.parent / "pyproject.toml"
    settings.write_text('[tool.halfstep]\nignore = ["HS101"]\n')
    assert main(["check", str(script)]) == 0
    settings.write_text('[tool.halfstep.severity]\namp-clip-before-unscale = "info"\n')
    capsys.readouterr()
    main(["check", "--format", "json", str(script)])
    assert [f["severity"] for f in _json(capsys)] == ["info"]
    assert main(["check", "--severity", "warning", str(script)]) == 0
    settings.write_text('[tool.halfstep]\nexclude = ["train.py"]\n')
    assert main(["check", str(script.parent)]) == 0


def test_severity_is_given_by_name_or_by_the_start_of_a_code(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = script.parent / "pyproject.toml"
    for table, wanted in (('HS101 = "info"', "info"), ('HS1 = "perf"\namp-clip-before-unscale = "style"', "style")):
        settings.write_text(f"[tool.halfstep.severity]\n{table}\n")
        main(["check", "--format", "json", str(script)])
        assert [f["severity"] for f in _json(capsys)] == [wanted]


def test_rules_may_be_listed_with_blanks(script: Path) -> None:
    assert main(["check", "--select", "HS101, HS102,", str(script)]) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '[tool.halfstep]\nseverity = "error"',
            "`severity` is 'error'; it should be a table of rules, `[tool.halfstep.severity]`.",
        ),
        ("tool.halfstep = 3", "`halfstep` is 3; it should be a table, `[tool.halfstep]`."),
    ],
)
def test_settings_of_the_wrong_kind_exit_2(text: str, said: str, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = script.parent / "pyproject.toml"
    file.write_text(f"{text}\n")
    assert main(["check", str(script)]) == 2
    assert capsys.readouterr().err == f"halfstep: {file.resolve()}: {said}\n"


def test_settings_that_this_python_cannot_read_exit_2(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = script.parent / "pyproject.toml"
    file.write_text("[tool.halfstep]\n")
    for package in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, package, None)
    assert main(["check", str(script)]) == 2
    said = f"halfstep: {file.resolve()} cannot be read: before Python 3.11 that needs the package `tomli`.\n"
    assert capsys.readouterr().err == said


def test_wrong_key_of_the_settings_exits_2(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (script.parent / "pyproject.toml").write_text("[tool.halfstep]\nselct = []\n")
    assert main(["check", str(script)]) == 2
    assert "[tool.halfstep] has no key `selct`. It knows select, ignore, severity, exclude." in capsys.readouterr().err


def test_standard_input_is_checked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BAD.encode())))
    assert main(["check", "--format", "json", "--stdin-filename", "a.py", "-"]) == 1
    assert [f["path"] for f in _json(capsys)] == ["a.py"]


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    head, _, body = BAD.partition("\n\n\n")
    cells = [
        {"cell_type": "code", "source": [*head.splitlines(keepends=True), "\n%matplotlib inline"]},
        {"cell_type": "markdown", "source": ["# entraîner"]},
        {"cell_type": "code", "source": ["%%bash\n", "ls -l; echo"]},
        {"cell_type": "code", "source": f"%%time\n{body}"},
    ]
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def test_notebook_finding_names_cell_and_line(notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--format", "json", str(notebook)]) == 1
    (finding,) = _json(capsys)
    clip = next(n for n, text in enumerate(BAD.partition("\n\n\n")[2].splitlines(), 2) if "clip_grad_norm_" in text)
    assert (finding["rule"], finding["cell"], finding["line"]) == ("amp-clip-before-unscale", 4, clip)
    main(["check", str(notebook)])
    assert f"--> {notebook}:cell 4:{clip}:13\n   |\n{clip - 1} |             scaler.scale(" in capsys.readouterr().out


def test_notebook_is_fixed_in_its_cell_and_all_else_is_kept(notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = notebook.read_text(encoding="utf-8")
    assert main(["check", "--diff", "--unsafe-fixes", str(notebook)]) == 1
    assert capsys.readouterr().out.startswith(f"--- {notebook}:cell 4\n")
    assert notebook.read_text(encoding="utf-8") == before
    assert main(["check", "--unsafe-fixes", str(notebook)]) == 0
    clip = "            nn.utils.clip"
    assert notebook.read_text(encoding="utf-8") == before.replace(clip, f"            scaler.unscale_(optimizer)\\n{clip}")


def test_baseline_hides_what_was_there_and_shows_what_is_new(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = script.parent / "known.json"
    assert main(["check", "--write-baseline", str(baseline), str(script)]) == 0
    assert main(["check", "--baseline", str(baseline), str(script)]) == 0
    script.write_text(find_rule("clip-after-step").card.example)
    capsys.readouterr()
    assert main(["check", "--format", "json", "--baseline", str(baseline), str(script)]) == 1
    assert [f["rule"] for f in _json(capsys)] == ["clip-after-step"]


def test_baseline_that_cannot_be_written_exits_2(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--write-baseline", "no/such/folder.json", str(script)]) == 2
    assert capsys.readouterr().err == "halfstep: no/such/folder.json cannot be written: No such file or directory.\n"


def test_baseline_that_is_not_there_exits_2(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = script.parent / "none.json"
    assert main(["check", "--baseline", str(missing), str(script)]) == 2
    said = f"halfstep: {missing} cannot be read: No such file or directory. Make it with `--write-baseline {missing}`.\n"
    assert capsys.readouterr().err == said


def test_file_that_is_no_baseline_exits_2(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (script.parent / "b.json").write_text("no")
    assert main(["check", "--baseline", str(script.parent / "b.json"), str(script)]) == 2
    assert "is not a baseline. Make one with" in capsys.readouterr().err


def test_sarif_names_rule_place_and_level(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "--format", "sarif", str(script)])
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    (result,) = run["results"]
    assert (result["ruleId"], result["level"]) == ("HS101", "error")
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["HS101"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == script.as_uri()


def test_github_annotation_is_one_escaped_line(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "--format", "github", str(script)])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("::error file=")
    assert "title=amp-clip-before-unscale::HS101 " in line


def test_explain_prints_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "HS101"]) == 0
    assert capsys.readouterr().out.startswith("# amp-clip-before-unscale (HS101)")
    assert main(["explain", "nothing"]) == 2


def test_finding_names_the_world_it_holds_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(find_rule("grad-zero-missing-branch").card.example)
    main(["check", "--format", "json", str(path)])
    assert [f["world"] for f in _json(capsys)] == ["when `use_amp` is false"]


def test_helper_in_another_file_of_the_project_is_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = BAD.replace("nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "tame(model)")
    (tmp_path / "train.py").write_text(body.replace("import torch\n", "import torch\nfrom gradients import tame\n", 1))
    (tmp_path / "gradients.py").write_text(
        "from torch import nn\n\n\ndef tame(model):\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    )
    main(["check", "--format", "json", str(tmp_path / "train.py"), str(tmp_path / "gradients.py")])
    assert [f["rule"] for f in _json(capsys)] == ["amp-clip-before-unscale"]


@pytest.mark.parametrize(("schedule", "fixed"), [("CosineAnnealingLR(optimizer, 10)", False), ("ConstantLR(optimizer)", True)])
def test_a_schedule_that_lost_its_count_is_not_mended_by_an_order_of_lines(
    schedule: str, fixed: bool, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = find_rule("sched-restore-order").card.example
    script.write_text(text.replace("LambdaLR(optimizer, lambda epoch: 0.9**epoch)", schedule))
    assert main(["check", "--select", "sched-restore-order", "--format", "json", str(script)]) == 1
    (finding,) = _json(capsys)
    assert (finding["fix"] is not None) == fixed
