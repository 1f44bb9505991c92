"""What the resolved text of a program says besides its events: deprecated names, classes of data sets and modules."""

from __future__ import annotations

import ast

from halfstep.events.trace import Fact
from halfstep.events.vocabulary import Place


def facts_of(tree: ast.Module, path: str) -> list[Fact]:
    """All facts of one file."""
    names = imported_names(tree)
    found: list[Fact] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            dotted = dotted_name(node.func, names)
            if dotted is not None and dotted.startswith(("torch.cuda.amp.", "torch.cpu.amp.")):
                found.append(Fact("deprecated call", place_of(node, path), dotted, {"func": ast.unparse(node.func), "node": node}))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for decorator in node.decorator_list:
                dotted = dotted_name(decorator, names)
                if dotted in ("torch.cuda.amp.autocast", "torch.cpu.amp.autocast"):
                    found.append(Fact("deprecated call", place_of(decorator, path), dotted, {"node": decorator}))
    return found


def place_of(node: ast.AST, path: str) -> Place:
    """Where a node stands."""
    return Place(path, getattr(node, "lineno", 1), getattr(node, "col_offset", 0), getattr(node, "end_lineno", 0) or 0, getattr(node, "end_col_offset", 0) or 0)


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Full dotted paths of the imported names."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted_name(node: ast.expr, names: dict[str, str]) -> str | None:
    """The full dotted path of an expression, if it is a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    return ".".join([names[node.id], *reversed(parts)])
