"""The syntax tree of a file, asked by place: which node, statement, block and function stand there."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator

from halfstep.events.vocabulary import Place

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Block = list[ast.stmt]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
"""Statements whose inner lines run elsewhere."""


class Syntax:
    """A parsed file and its bytes; columns of the tree are columns in bytes."""

    def __init__(self, source: str, tree: ast.Module, path: str) -> None:
        self.source, self.tree, self.path = source, tree, path
        self.lines = [line.encode() for line in source.split("\n")]
        self.parents: dict[ast.AST, ast.AST] = {}
        self._at: dict[tuple[int, int, int, int], list[ast.AST]] = {}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
            if isinstance(node, (ast.stmt, ast.expr)):
                self._at.setdefault(_span(node), []).append(node)
        self.inside_strings = _inside_strings(source)
        self.names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
            a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)
        }
        self.names |= {n.name for n in ast.walk(tree) if isinstance(n, DEFINITIONS)}

    def here(self, place: Place | None) -> bool:
        """Whether a place stands in this file."""
        return place is not None and place.path == self.path and place.end_line > 0

    def nodes_at(self, place: Place) -> list[ast.AST]:
        """The nodes with exactly this extent, outermost first."""
        return self._at.get((place.line, place.column, place.end_line, place.end_column), [])

    def call_at(self, place: Place | None) -> ast.Call | None:
        """The call at a place of this file."""
        if place is None or not self.here(place):
            return None
        return next((n for n in self.nodes_at(place) if isinstance(n, ast.Call)), None)

    def statement_at(self, place: Place) -> ast.stmt | None:
        """The innermost statement around a place."""
        nodes = self.nodes_at(place)
        return self.statement(nodes[0]) if nodes else None

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement around a node."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def block(self, statement: ast.stmt) -> tuple[Block, int]:
        """The list of statements that one stands in, and its index."""
        parent = self.parents[statement]
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and statement in block:
                return block, block.index(statement)
        raise AssertionError("a statement stands in a block of its parent")

    def blocks_up(self, statement: ast.stmt) -> Iterator[tuple[Block, int]]:
        """The blocks around a statement within its function, innermost first."""
        node: ast.AST = statement
        while node in self.parents:
            parent = self.parents[node]
            if isinstance(node, ast.stmt):
                yield self.block(node)
            if isinstance(parent, (*DEFINITIONS, ast.Lambda)):
                return
            node = parent

    def loop_around(self, node: ast.AST) -> ast.For | ast.While | None:
        """The innermost loop around a node, within its function."""
        while node in self.parents and not isinstance(node, DEFINITIONS):
            node = self.parents[node]
            if isinstance(node, (ast.For, ast.While)):
                return node
        return None

    def function(self, node: ast.AST) -> FunctionNode | None:
        """The function around a node, None at the level of the module."""
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return node
        return None

    def owner(self, function: FunctionNode | None) -> ast.ClassDef | None:
        """The class of a method."""
        parent = self.parents.get(function) if function is not None else None
        return parent if isinstance(parent, ast.ClassDef) else None

    def is_within(self, inner: FunctionNode | None, outer: FunctionNode | None) -> bool:
        """Whether a function is another or is defined in it."""
        while inner is not outer and inner is not None:
            inner = self.function(inner)
        return inner is outer

    def text(self, node: ast.AST) -> str:
        """The source of a node as it was written."""
        line, column, end_line, end_column = _span(node)
        if line == end_line:
            return self.lines[line - 1][column:end_column].decode()
        middle = self.lines[line : end_line - 1]
        return b"\n".join([self.lines[line - 1][column:], *middle, self.lines[end_line - 1][:end_column]]).decode()

    def indent(self, statement: ast.stmt) -> str:
        """The white space before a statement."""
        line = self.lines[statement.lineno - 1]
        return line[: len(line) - len(line.lstrip())].decode()

    def unit(self, statement: ast.stmt) -> str:
        """One level of indentation as it is written near a statement."""
        outer: ast.AST | None = self.parents.get(statement)
        own = self.indent(statement)
        if isinstance(outer, ast.stmt) and own.startswith(self.indent(outer)) and own != self.indent(outer):
            return own[len(self.indent(outer)) :]
        return "\t" if any(line.startswith(b"\t") for line in self.lines) else "    "

    def has_lines_alone(self, statement: ast.stmt) -> bool:
        """Whether a statement shares its lines with no other and can be moved with them."""
        before = self.lines[first_line(statement) - 1][: statement.col_offset] if not _decorated(statement) else b""
        after = self.lines[end_line(statement) - 1][statement.end_col_offset or 0 :].strip()
        return not before.strip() and (not after or after.startswith(b"#"))

    def fresh(self, *wanted: str) -> str:
        """The first of these names that the file does not use."""
        attributes = {n.attr for n in ast.walk(self.tree) if isinstance(n, ast.Attribute)}
        return next((n for n in wanted if n not in self.names and n not in attributes), f"{wanted[0]}_")


def first_line(statement: ast.stmt) -> int:
    """The first line of a statement, with its decorators."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)])


def end_line(node: ast.stmt | ast.expr) -> int:
    """The last line of a node."""
    return node.end_lineno or node.lineno


def bound_names(node: ast.AST) -> set[str]:
    """The names that a statement gives values to."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, (ast.Store, ast.Del))}
    return found | {n.name for n in ast.walk(node) if isinstance(n, DEFINITIONS)}


def read_names(node: ast.AST) -> set[str]:
    """The names that a node reads; those that an augmented assignment changes are read as well."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return found | {n.target.id for n in ast.walk(node) if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)}


def neighbours(indices: Iterable[int]) -> list[tuple[int, int]]:
    """The runs of numbers that follow each other, first and last of each."""
    found: list[tuple[int, int]] = []
    for index in sorted(indices):
        if found and found[-1][1] == index - 1:
            found[-1] = (found[-1][0], index)
        else:
            found.append((index, index))
    return found


def is_plain(node: ast.expr) -> bool:
    """Whether an expression needs no parentheses beside an operator."""
    return isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant))


def quotient(syntax: Syntax, node: ast.expr, divisor: str) -> str:
    """An expression divided by something."""
    text = syntax.text(node)
    return f"{text} / {divisor}" if is_plain(node) else f"({text}) / {divisor}"


def _decorated(statement: ast.stmt) -> bool:
    return bool(getattr(statement, "decorator_list", None))


def _span(node: ast.AST) -> tuple[int, int, int, int]:
    return (
        getattr(node, "lineno", 0),
        getattr(node, "col_offset", 0),
        getattr(node, "end_lineno", 0) or 0,
        getattr(node, "end_col_offset", 0) or 0,
    )


def _inside_strings(source: str) -> frozenset[int]:
    """The lines that begin inside a string, whose white space is part of it."""
    found: set[int] = set()
    opened: list[int] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            name = tokenize.tok_name[token.type]
            if name in ("FSTRING_START", "TSTRING_START"):
                opened.append(token.start[0])
            elif name in ("FSTRING_END", "TSTRING_END"):
                found.update(range(opened.pop() + 1, token.end[0] + 1))
            elif token.type == tokenize.STRING:
                found.update(range(token.start[0] + 1, token.end[0] + 1))
    except (tokenize.TokenError, SyntaxError, IndexError):
        return frozenset()
    return frozenset(found)
