"""The source of halfstep as the architecture tests read it: never imported, only parsed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "halfstep"
ENTRANCE = ("__init__.py", "__main__.py", "_compat.py")
"""Files that are in no package of the table: the lazy door, `python -m halfstep`, and what asks for torch's version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Path under the package, such as `engine/finish.py`."""
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def package(self) -> str | None:
        """The package of the table that it belongs to; None at the entrance."""
        parts = self.path.relative_to(PACKAGE).parts
        if len(parts) > 1:
            return parts[0]
        return None if parts[0] in ENTRANCE else self.path.stem

    def imports(self) -> Iterator[tuple[str, int]]:
        """Every module that it imports anywhere, with the line."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield node.module, node.lineno
                if node.module == "halfstep":
                    yield from ((f"halfstep.{alias.name}", node.lineno) for alias in node.names)

    def functions(self) -> Iterator[tuple[str, int]]:
        """Every function and method, with how many lines it has: signature, docstring and all."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{self.name}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1

    def dotted(self) -> Iterator[tuple[str, int]]:
        """Every name and attribute that is read, as written: `os.environ`, `print`."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Attribute, ast.Name)):
                yield ast.unparse(node), node.lineno


@cache
def sources() -> tuple[Source, ...]:
    """Every file of halfstep."""
    return tuple(_read(path) for path in sorted(PACKAGE.rglob("*.py")))


def _read(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    return Source(path=path, text=text, tree=ast.parse(text))
