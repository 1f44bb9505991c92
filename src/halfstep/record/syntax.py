"""What the text of a user's file says: its loops, and the names that its objects get."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from halfstep.events.vocabulary import Place
from halfstep.imagine.project import parse

_BATCHES = re.compile(r"(loader|batches|dataloader|(^|_)dl)$", re.I)
Position = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """A `for` or `while` of the text."""

    place: Place
    over: str
    name: str
    """What it runs over, if that has a name."""
    head: Position
    body: Position
    end: Position
    scope: int


@dataclass(slots=True)
class Syntax:
    """One file."""

    path: str
    loops: list[Loop] = field(default_factory=list)
    scopes: list[tuple[Position, Position]] = field(default_factory=list)
    names: dict[tuple[int, int, int, int], str] = field(default_factory=dict)
    """Names that calls are assigned to, by the call's position."""
    called: dict[tuple[int, int, int, int], str] = field(default_factory=dict)
    """What is called, without its last attribute for a method, by the call's position."""

    def around(self, function: str, line: int, column: int) -> tuple[tuple[Loop, ...], Loop | None]:
        """The loops around a position in its function, outermost first, and the loop in whose header it stands."""
        if function.startswith("<") and function != "<module>":
            return (), None
        at = (line, column)
        scope = self.scope(at)
        mine = [loop for loop in self.loops if loop.scope == scope]
        loops = tuple(loop for loop in mine if loop.body <= at <= loop.end)
        heads = [loop for loop in mine if loop.head <= at < loop.body and loop not in loops]
        return loops, heads[-1] if heads else None

    def scope(self, at: Position) -> int:
        """The innermost function around a position, by number; -1 outside of all."""
        inside = [number for number, (start, end) in enumerate(self.scopes) if start <= at <= end]
        return inside[-1] if inside else -1

    def place(self, line: int, column: int, end_line: int, end_column: int) -> Place:
        """A place in this file."""
        return Place(self.path, line, column, end_line, end_column)

    def name_at(self, place: Place) -> str:
        """The name that the result of the call at a place gets."""
        return self.names.get((place.line, place.column, place.end_line, place.end_column), "")

    def receiver_at(self, place: Place) -> str:
        """Whose method is called at a place, or what is called."""
        return self.called.get((place.line, place.column, place.end_line, place.end_column), "")


@lru_cache(maxsize=256)
def syntax_of(path: str) -> Syntax | None:
    """The loops and names of a file, or None where it cannot be read."""
    try:
        tree = parse(Path(path).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    if tree is None:
        return None
    found = Syntax(path)
    _visit(tree, found, -1)
    return found


def items_name(place: Place) -> str:
    """The name of what the loop whose items stand at a place runs over."""
    syntax = syntax_of(place.path)
    return next((loop.name for loop in syntax.loops if loop.place == place), "") if syntax is not None else ""


def _visit(node: ast.AST, found: Syntax, scope: int) -> None:
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = len(found.scopes)
            found.scopes.append((_start(child.body[0]), _end(child.body[-1])))
        elif isinstance(child, (ast.For, ast.AsyncFor)):
            found.loops.append(_for(child, found.path, scope))
        elif isinstance(child, ast.While):
            place = _place(child.test, found.path)
            start = _start(child.test)
            found.loops.append(Loop(place, "while", "", start, start, _end(child.body[-1]), scope))
        elif isinstance(child, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            _note_names(child, found)
        elif isinstance(child, ast.Call):
            found.called[_key(child)] = _receiver(child.func)
        _visit(child, found, inner)


def _for(node: ast.For | ast.AsyncFor, path: str, scope: int) -> Loop:
    text = ast.unparse(node.iter)
    named = [
        n.attr if isinstance(n, ast.Attribute) else n.id for n in ast.walk(node.iter) if isinstance(n, (ast.Attribute, ast.Name))
    ]
    batches = next((name for name in named if _BATCHES.search(name)), "")
    over = "loader" if batches and not text.startswith(("range(", "len(")) else "count" if "range(" in text else "items"
    return Loop(
        _place(node.iter, path), over, batches, (node.lineno, node.col_offset), _start(node.body[0]), _end(node.body[-1]), scope
    )


def _note_names(node: ast.Assign | ast.AnnAssign | ast.NamedExpr, found: Syntax) -> None:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    pairs: list[tuple[ast.expr, ast.expr | None]] = []
    for target in targets:
        if isinstance(target, (ast.Tuple, ast.List)) and isinstance(node.value, (ast.Tuple, ast.List)):
            pairs += zip(target.elts, node.value.elts, strict=False)
        else:
            pairs.append((target, node.value))
    for target, value in pairs:
        calls = [n for n in ast.walk(value) if isinstance(n, ast.Call)] if value is not None else []
        for call in calls:
            found.names.setdefault(_key(call), _short(target))


def _receiver(func: ast.expr) -> str:
    return _short(func.value) if isinstance(func, ast.Attribute) else _short(func)


def _short(node: ast.expr) -> str:
    return ast.unparse(node)[:60] if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) else ""


def _key(node: ast.expr) -> tuple[int, int, int, int]:
    return (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)


def _place(node: ast.expr, path: str) -> Place:
    return Place(path, *_key(node))


def _start(node: ast.stmt | ast.expr) -> Position:
    return (node.lineno, node.col_offset)


def _end(node: ast.stmt) -> Position:
    return (node.end_lineno or node.lineno, node.end_col_offset or 0)
