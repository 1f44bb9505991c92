"""Text edits at exact places of a source, and the editor that knows the source by its tree."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from halfstep.events.vocabulary import Place
from halfstep.findings.finding import Edit
from halfstep.imagine.converting.syntax import Syntax, end_line, first_line
from halfstep.imagine.project import parse


def applied(source: str, edits: Iterable[Edit]) -> str:
    """The source after the edits; edits that overlap an earlier one are left out."""
    starts = _line_starts(source)
    spans = sorted((_offset(starts, e.line, e.column), _offset(starts, e.end_line, e.end_column), e.text) for e in edits)
    out: list[str] = []
    position = 0
    for start, end, text in spans:
        if start < position or end < start:
            continue
        out.append(source[position:start])
        out.append(text)
        position = end
    out.append(source[position:])
    return "".join(out)


def _line_starts(source: str) -> list[int]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _offset(starts: list[int], line: int, column: int) -> int:
    return min(starts[min(line - 1, len(starts) - 1)] + column, starts[-1])


class Editor:
    """One source, asked by place and edited by statement."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines = source.splitlines()
        self._syntax: Syntax | None = None

    @property
    def syntax(self) -> Syntax:
        """The tree of the source, made at the first asking."""
        if self._syntax is None:
            tree = parse(self.source)
            assert tree is not None, "a finding is of a source that can be parsed"
            self._syntax = Syntax(self.source, tree, "")
        return self._syntax

    def call(self, place: Place | None) -> ast.Call | None:
        """The call at a place."""
        nodes = self.syntax.nodes_at(place) if place is not None else []
        return next((n for n in nodes if isinstance(n, ast.Call)), None)

    def statement(self, place: Place | None) -> ast.stmt | None:
        """The innermost statement around a place, if it can be moved with its lines."""
        found = self.syntax.statement_at(place) if place is not None else None
        return found if found is not None and self.syntax.has_lines_alone(found) else None

    def simple(self, place: Place | None) -> ast.Expr | ast.Assign | ast.AugAssign | None:
        """The statement at a place, if it is an expression or an assignment that can be moved with its lines."""
        found = self.statement(place)
        return found if isinstance(found, (ast.Expr, ast.Assign, ast.AugAssign)) else None

    def before(self, statement: ast.stmt, *texts: str) -> Edit:
        """New lines before a statement, with its indentation."""
        line = first_line(statement)
        indent = self.syntax.indent(statement)
        return Edit(line, 0, line, 0, "".join(f"{indent}{text}\n" for text in texts))

    def after(self, statement: ast.stmt, *texts: str) -> Edit:
        """New lines after a statement, with its indentation."""
        line = end_line(statement)
        indent, end = self.syntax.indent(statement), len(self.lines[line - 1])
        return Edit(line, end, line, end, "".join(f"\n{indent}{text}" for text in texts))

    def cut(self, statement: ast.stmt) -> Edit:
        """A statement taken out with its lines."""
        return Edit(first_line(statement), 0, end_line(statement) + 1, 0, "")

    def between(self, first: ast.stmt | ast.expr, last: ast.stmt | ast.expr, text: str) -> Edit:
        """Another text from the beginning of a node to the end of another."""
        end = end_line(last)
        return Edit(
            first.lineno, self.column(first.lineno, first.col_offset), end, self.column(end, last.end_col_offset or 0), text
        )

    def swap(self, node: ast.expr, text: str) -> Edit:
        """Another text for a node."""
        return self.between(node, node, text)

    def text(self, place: Place) -> str:
        """The source of a place on one line, else nothing."""
        if place.line != place.end_line or place.line > len(self.lines):
            return ""
        raw = self.lines[place.line - 1].encode()
        return raw[place.column : place.end_column].decode(errors="replace")

    def column(self, line: int, byte_column: int) -> int:
        """The character column of a byte column."""
        return len(self.lines[line - 1].encode()[:byte_column].decode(errors="replace"))
