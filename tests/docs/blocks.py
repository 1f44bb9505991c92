"""What stands in a document: its code blocks, what each is said to print, and what is run together.

- The `python` blocks of a chapter (from one `##` heading to the next) continue one another, as a reader types them.
- A block whose first line is `# name.py` or `# name.toml` is a file; a command of the document runs it.
- The lines of a `bash` block are commands. One that is meant to fail says so: `# exit code 1`.
- A `text` block is what the block before it prints; `...` stands for what differs between machines.
"""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
FILE_NAME = re.compile(r"# ([\w-]+\.(?:py|toml))\n")
EXIT_CODE = re.compile(r"#.*(?:exit code|退出码) (\d)")
KINDS = {"python", "toml", "bash", "text", "sh", "yaml"}
"""Of these `sh` and `yaml` are for clusters: `test_many_machines.py` looks at them."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block."""

    chapter: str
    kind: str
    text: str
    prints: str | None = None

    @property
    def file_name(self) -> str | None:
        """The file that the block is, if it is one."""
        name = FILE_NAME.match(self.text)
        return name[1] if name and self.kind in ("python", "toml") else None

    @property
    def code(self) -> str:
        """The block without comments, and without words that are shown to a reader: what a translation must leave alone."""
        if self.kind == "python":
            return _without_words(self.text)
        return "\n".join(line for line in (re.sub(r"\s*#.*", "", line) for line in self.text.splitlines()) if line)


@dataclass(frozen=True, kw_only=True)
class Command:
    """One line of a `bash` block."""

    words: list[str]
    code: int


@dataclass(frozen=True)
class Document:
    """A Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    @cached_property
    def blocks(self) -> list[Block]:
        """Its blocks in order; what a block prints is part of it."""
        found: list[Block] = []
        for chapter in re.split(r"^(?=## )", self.path.read_text(encoding="utf-8"), flags=re.M):
            title = chapter.splitlines()[0].lstrip("# ") if chapter else ""
            for kind, text in BLOCK.findall(chapter):
                if kind == "text" and found:
                    found[-1] = Block(chapter=title, kind=found[-1].kind, text=found[-1].text, prints=text)
                else:
                    found.append(Block(chapter=title, kind=kind, text=text))
        return found

    @property
    def files(self) -> dict[str, str]:
        """The files that its blocks are, by name."""
        return {block.file_name: block.text for block in self.blocks if block.file_name}

    @property
    def programs(self) -> list[list[Block]]:
        """The `python` blocks of each chapter that has some."""
        typed = [block for block in self.blocks if block.kind == "python" and not block.file_name]
        return [list(blocks) for _, blocks in groupby(typed, key=lambda block: block.chapter)]

    @property
    def shells(self) -> list[Block]:
        """Its `bash` blocks."""
        return [block for block in self.blocks if block.kind == "bash"]


def commands(block: Block) -> list[Command]:
    """The lines of a `bash` block, with the exit code that each is meant to have."""
    found = []
    for line in filter(None, map(str.strip, block.text.splitlines())):
        code = EXIT_CODE.search(line)
        found.append(Command(words=shlex.split(line, comments=True), code=int(code[1]) if code else 0))
    return found


class _Wordless(ast.NodeTransformer):
    """Blanks what is said to a reader: what is printed or formatted, and text with spaces; names such as "bf16" stay."""

    def __init__(self) -> None:
        self._shown = 0

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        told = isinstance(node.value, str) and (self._shown > 0 or not re.fullmatch(r"[!-~]*", node.value))
        return ast.Constant(value="") if told else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        values = sorted((self._inside(part) for part in node.values if isinstance(part, ast.FormattedValue)), key=ast.dump)
        return ast.JoinedStr(values=values)  # another language may have them in another order

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self._inside(node) if isinstance(node.func, ast.Name) and node.func.id == "print" else self.generic_visit(node)

    def _inside(self, node: ast.AST) -> ast.AST:
        self._shown += 1
        self.generic_visit(node)
        self._shown -= 1
        return node


def _without_words(text: str) -> str:
    return ast.unparse(ast.fix_missing_locations(_Wordless().visit(ast.parse(text))))
