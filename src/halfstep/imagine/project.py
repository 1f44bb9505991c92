"""The files of a program: parses them once, and finds the ones that an import means."""

from __future__ import annotations

import ast
import re
import warnings
from functools import lru_cache
from pathlib import Path

from halfstep.imagine.values import Module

MAX_IMPORTED_BYTES = 300_000
MAX_MODULES = 12


class Project:
    """The file under check and its neighbours that it imports."""

    def __init__(self, tree: ast.Module, path: str) -> None:
        self.main = Module("__main__", path, tree)
        self._found: dict[str, Module | None] = {}
        self._generators: dict[int, bool] = {}
        self._trees: dict[str, ast.Module | None] = {path: tree}

    def fresh(self) -> None:
        """Forget what was run, for the next world."""
        self.main = Module("__main__", self.main.path, self.main.tree)
        self._found = {
            key: Module(found.name, found.path, found.tree) if found is not None else None for key, found in self._found.items()
        }

    def find(self, dotted: str, importer: str) -> Module | None:
        """The project's module of this name as seen from a file, or None if it is a library."""
        if not dotted or len(self._found) > 200:
            return None
        key = f"{Path(importer).parent}:{dotted}"
        if key not in self._found:
            path = _locate(dotted, importer)
            tree = self._parse(path) if path is not None else None
            self._found[key] = Module(dotted.lstrip("."), str(path), tree) if tree is not None else None
        return self._found[key]

    def _parse(self, path: Path) -> ast.Module | None:
        name = str(path)
        if name not in self._trees:
            self._trees[name] = None
            if len(self._trees) <= MAX_MODULES and path.stat().st_size < MAX_IMPORTED_BYTES:
                self._trees[name] = parse(path.read_text(encoding="utf-8", errors="replace"))
        return self._trees[name]

    def is_generator(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        """Whether a function yields."""
        key = id(node)
        if key not in self._generators:
            self._generators[key] = _yields(node.body)
        return self._generators[key]


@lru_cache(maxsize=2)
def parse(text: str) -> ast.Module | None:
    """The syntax tree, or None where there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def fault_of(text: str) -> str:
    """Why a text has no syntax tree."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return str(error) or type(error).__name__
    return ""


def _locate(dotted: str, importer: str) -> Path | None:
    level = len(dotted) - len(dotted.lstrip("."))
    parts = [p for p in dotted.lstrip(".").split(".") if p]
    here = Path(importer).parent
    if importer.startswith("<"):
        return None
    if level:
        for _ in range(level - 1):
            here = here.parent
        return _file(here.joinpath(*parts))
    if not parts or parts[0] in ("torch", "numpy", "transformers", "os", "sys"):
        return None
    for root in (here, here.parent):
        found = _file(root.joinpath(*parts))
        if found is not None:
            return found
    return None


def _file(base: Path) -> Path | None:
    try:
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    except (OSError, ValueError):
        return None
    return None


def _yields(body: list[ast.stmt]) -> bool:
    todo: list[ast.AST] = list(body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            todo.extend(ast.iter_child_nodes(node))
    return False


OF_DATA = re.compile(r"Exception|RuntimeError|OutOfMemoryError|ValueError|OSError|IOError")
"""Exceptions that come from what a batch holds, and so on one rank only."""


def skipping(node: ast.Try) -> ast.ExceptHandler | None:
    """The handler that leaves out what a batch is for and lets the loop go on: a turn, a function, or a backward pass."""
    calls = (n.func for statement in node.body for n in ast.walk(statement) if isinstance(n, ast.Call))
    trains = any(isinstance(func, ast.Attribute) and func.attr == "backward" for func in calls)
    return next(
        (
            h
            for h in node.handlers
            if (h.type is None or OF_DATA.search(ast.unparse(h.type)))
            and (_goes_on(h) or (trains and not isinstance(h.body[-1], (ast.Raise, ast.Break))))
        ),
        None,
    )


def _goes_on(handler: ast.ExceptHandler) -> bool:
    """Whether a handler ends the turn of the loop around it, or the function."""
    return isinstance(handler.body[-1], ast.Return) or any(isinstance(n, ast.Continue) for n in ast.walk(handler))


@lru_cache(maxsize=512)
def text_of(node: ast.AST) -> str:
    """The text of a part of the program, which is asked for often."""
    return ast.unparse(node)


@lru_cache(maxsize=512)
def attributes_read(node: ast.AST) -> frozenset[str]:
    """The names of the attributes that a part of the program reads."""
    return frozenset(n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load))
