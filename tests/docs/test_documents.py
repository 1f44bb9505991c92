"""Every code block of the documents runs, and every path they name exists."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
BLOCKS = [
    pytest.param(document, kind, text, id=f"{document.name}-{number}-{kind}")
    for document in DOCUMENTS
    for number, (kind, text) in enumerate(BLOCK.findall(document.read_text()), 1)
]
SCRIPT = "model = torch.nn.Linear(1, 1)\n"


@pytest.fixture
def place(tmp_path):
    """A folder with the files that the documents speak of."""
    (tmp_path / "shakespeare.txt").write_text("To be, or not to be, that is the question.\n" * 400)
    (tmp_path / "train.py").write_text(SCRIPT)
    for _, kind, text in [(p.values[0], p.values[1], p.values[2]) for p in BLOCKS]:
        name = re.match(r"# ([\w-]+\.toml)\n", text)
        if kind == "toml" and name:
            (tmp_path / name[1]).write_text(text)
    return tmp_path


def run(words, place):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(place)}
    return subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(("document", "kind", "text"), BLOCKS)
def test_code_block_runs(document, kind, text, place):
    if kind == "python":
        done = run([sys.executable, "-W", "error::UserWarning", "-c", text], place)
        assert done.returncode == 0, done.stderr
    elif kind == "bash":
        for line in filter(None, map(str.strip, text.splitlines())):
            words = shlex.split(line, comments=True)
            if words[0] == "make":
                words = ["make", "--dry-run", "-C", str(ROOT), *words[1:]]  # the real thing would start these tests again
            elif words[0] == "uv":
                continue  # resolves against the registry; what it writes is what `make` installs from
            done = run(words, place)
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    else:
        assert kind in {"toml"}, f"{document.name} has a block of kind {kind!r} that no test runs"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_that_a_document_names_exist(document):
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+)`", document.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_readme_is_one_screen():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80


def test_contributing_is_within_sixty_lines():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 60
