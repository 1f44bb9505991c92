"""Imports that a conversion needs, put where the file has its others."""

from __future__ import annotations

import ast

from halfstep.imagine.converting.patch import Patch
from halfstep.imagine.facts import imported_names


def ensure(patch: Patch, *lines: str) -> None:
    """Import what the file does not import yet; each line is one import of one name."""
    names = imported_names(patch.syntax.tree)
    missing = [line for line in lines if not _has(names, line)]
    if not missing:
        return
    at = [s for s in patch.syntax.tree.body if isinstance(s, (ast.Import, ast.ImportFrom))]
    plain = [s for s in at if not (isinstance(s, ast.ImportFrom) and s.module == "__future__")]
    for line in missing:
        _add(patch, line, at, plain)


def put_constant(patch: Patch, line: str) -> None:
    """A constant after the imports at the head of the file, before any code that could use it."""
    last: ast.stmt | None = None
    for statement in patch.syntax.tree.body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            last = statement
        elif last is not None:
            break
    if last is not None:
        patch.after(last, "", line)
    else:
        patch.before(_first(patch), line, "")


def _has(names: dict[str, str], line: str) -> bool:
    made = imported_names(ast.parse(line))
    return all(names.get(name) == path for name, path in made.items())


def _add(patch: Patch, line: str, at: list[ast.Import | ast.ImportFrom], plain: list[ast.Import | ast.ImportFrom]) -> None:
    module = line.split()[1]
    root = module.split(".")[0]
    family = [s for s in plain if _module(s).split(".")[0] == root]
    earlier = [s for s in family if _key(s) < (line.startswith("from"), module)]
    if earlier:
        patch.after(earlier[-1], line)
    elif family:
        patch.before(family[0], line)
    elif plain and root in _STANDARD:
        patch.before(plain[0], line)
    elif at:
        patch.after(at[-1], line)
    else:
        patch.before(_first(patch), line)


_STANDARD = ("os", "contextlib", "math")


def _key(statement: ast.Import | ast.ImportFrom) -> tuple[bool, str]:
    return isinstance(statement, ast.ImportFrom), _module(statement)


def _module(statement: ast.Import | ast.ImportFrom) -> str:
    return (statement.module or "") if isinstance(statement, ast.ImportFrom) else statement.names[0].name


def _first(patch: Patch) -> ast.stmt:
    body = patch.syntax.tree.body
    docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and len(body) > 1
    return body[1] if docstring else body[0]
