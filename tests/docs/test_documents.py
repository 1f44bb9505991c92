"""Every code block of the documents runs and prints what they show, and every path they name exists."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.blocks import KINDS, Block, Document, commands
from halfstep.config.schema import known_keys

ROOT = Path(__file__).parents[2]
NAMES = ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md")
DOCUMENTS = [Document(path) for path in [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").glob("*.md"))]]
TRANSLATIONS = [("README.md", "README.zh-CN.md"), ("docs/guide.md", "docs/guide.zh.md")]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SCRIPT = "model = torch.nn.Linear(1, 1)\n"
END_OF_BLOCK = "\x1e"
ABORT_AT_EXIT = "terminate called without an active exception"
"""torch 2.13 on gloo now and then (2 of 104 runs here) says so when a rank's interpreter ends, all its work being done."""


def is_told_twice(document: Document, block: Block) -> bool:
    """Whether the block is a translation's, and the original runs the same commands on the same code and prints the same."""
    pairs = {ROOT / second: ROOT / first for first, second in TRANSLATIONS}
    original = Document(pairs[document.path]).shells if document.path in pairs else []
    return any((other.code, other.prints) == (block.code, block.prints) for other in original)


each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
each_program = pytest.mark.parametrize(
    ("document", "program"),
    [
        pytest.param(document, program, id=f"{document.name}-{number}")
        for document in DOCUMENTS
        for number, program in enumerate(document.programs, 1)
    ],
)
each_shell = pytest.mark.parametrize(
    ("document", "block"),
    [
        pytest.param(document, block, id=f"{document.name}-{number}")
        for document in DOCUMENTS
        for number, block in enumerate(document.shells, 1)
        if not is_told_twice(document, block)
    ],
)


@pytest.fixture
def place(tmp_path: Path, document: Document) -> Path:
    """A folder with the files that the document speaks of."""
    (tmp_path / "shakespeare.txt").write_text("To be, or not to be, that is the question.\n" * 400)
    (tmp_path / "train.py").write_text(SCRIPT)
    for name, text in document.files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(words: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONIOENCODING": "utf-8"}
    return subprocess.run(words, cwd=place, env=environment, capture_output=True, encoding="utf-8", timeout=300, check=False)


def run_command(words: list[str], place: Path, document: Document) -> subprocess.CompletedProcess[str]:
    """Once more after torch's own abort, if nothing of halfstep's took part; whatever fails otherwise stays failed."""
    done = run(words, place)
    scripts = [document.files[word] for word in words if word in document.files]
    if ABORT_AT_EXIT in done.stderr and scripts and not any("halfstep" in script for script in scripts):
        return run(words, place)
    return done


def assert_printed(block: Block, printed: str) -> None:
    if block.prints is None:
        return
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(block.prints, printed, flags), f"{block.text}\nprinted:\n{printed}"


@each_program
def test_python_blocks_of_a_chapter_run_and_print_what_is_shown(document: Document, program: list[Block], place: Path) -> None:
    script = place / "typed.py"
    script.write_text(f"\nprint({END_OF_BLOCK!r})\n".join(block.text for block in program), encoding="utf-8")
    done = run([sys.executable, "-W", "error::UserWarning", str(script)], place)
    assert done.returncode == 0, done.stderr
    for block, printed in zip(program, done.stdout.split(END_OF_BLOCK), strict=True):
        assert_printed(block, printed)


@each_shell
def test_commands_run_and_print_what_is_shown(document: Document, block: Block, place: Path) -> None:
    printed = ""
    for command in commands(block):
        words = command.words
        if words[0] == "make":
            words = ["make", "--dry-run", "-C", str(ROOT), *words[1:]]  # the real thing would start these tests again
        elif words[0] == "uv":
            continue  # resolves against the registry; what it writes is what `make` installs from
        done = run_command(words, place, document)
        assert done.returncode == command.code, f"{words}\n{done.stdout}\n{done.stderr}"
        printed += done.stdout
    assert_printed(block, printed)


@each_document
def test_no_block_is_left_unrun(document: Document) -> None:
    assert {block.kind for block in document.blocks} <= KINDS
    words = {word for block in document.shells for command in commands(block) for word in command.words}
    named = {name for text in [*words, *document.files.values()] for name in re.findall(r"\b(\w+):\w+", text)}
    run_by_commands = words | {f"{name}.py" for name in named}  # `module:function` runs a file, too
    assert set(document.files) <= run_by_commands, "a block that is a file is run by a command of its document"
    assert [block.text for block in document.blocks if block.kind in ("toml", "text") and not block.file_name] == []


@pytest.mark.parametrize(("original", "translation"), TRANSLATIONS)
def test_a_translation_holds_the_same_code(original: str, translation: str) -> None:
    first, second = ([block.code for block in Document(ROOT / name).blocks] for name in (original, translation))
    assert second == first


def test_the_guide_to_training_has_a_line_for_every_key_of_a_configuration() -> None:
    lines = re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs/train.md").read_text(encoding="utf-8"), re.M)
    assert sorted(lines) == sorted(known_keys())


@each_document
def test_paths_that_a_document_names_exist(document: Document) -> None:
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+)`", document.path.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_readme_is_one_screen(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 80


def test_contributing_is_within_sixty_lines() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 60
