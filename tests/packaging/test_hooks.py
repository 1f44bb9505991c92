"""The hook of pre-commit and the GitHub Action, run as those run them: without installing anything."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.findings.registry import find_rule

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(find_rule("amp-clip-before-unscale").card.example)
    return path


def test_hook_checks_the_files_it_is_given_without_any_installed_package(script):
    hooks = (ROOT / ".pre-commit-hooks.yaml").read_text()
    assert re.search(r"^  language: script$", hooks, re.M)
    entry = re.search(r"^  entry: (.+)$", hooks, re.M)[1]
    assert os.access(ROOT / entry, os.X_OK)
    words = [sys.executable, "-I", "-S", str(ROOT / entry), str(script)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=script.parent)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("HS101 error: ")


def test_action_annotates_what_it_finds(script):
    run = re.search(r"^      run: (.+)$", (ROOT / "action.yml").read_text(), re.M)[1]
    command = run.replace("python ", f"{shlex.quote(sys.executable)} -I -S ", 1)
    given = {**os.environ, "GITHUB_ACTION_PATH": str(ROOT), "PATHS": "train.py .", "ARGS": "--select HS1 --severity error"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=script.parent, env=given)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("::error file=train.py,line=")
    assert done.stdout.count("\n") == 1
