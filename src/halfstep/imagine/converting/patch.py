"""Edits of one file, collected and then made at once: lines put in, blocks moved into a `with` or `if`, expressions replaced.

What is not named by an edit keeps every byte.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from halfstep.findings.finding import Edit
from halfstep.imagine.converting.outcome import NotSure
from halfstep.imagine.converting.syntax import Syntax, end_line, first_line


@dataclass(frozen=True, slots=True)
class _Wrap:
    """Lines `first` to `last` move one level in, under a header."""

    first: int
    last: int
    header: str
    indent: str
    unit: str


@dataclass(frozen=True, slots=True)
class _Lines:
    """New lines before line `line`. `rank` orders what stands at one boundary."""

    line: int
    rank: int
    indent: str
    texts: tuple[str, ...]
    anchor: int
    """The old line to which they belong: the wraps around it are around them."""


_AFTER, _BEFORE, _HEADER, _INSIDE, _UNIT = range(5)


@dataclass(slots=True)
class Patch:
    """The edits of one pass."""

    syntax: Syntax
    _wraps: list[_Wrap] = field(default_factory=list)
    _lines: list[_Lines] = field(default_factory=list)
    _replaced: list[tuple[int, int, str]] = field(default_factory=list)
    _said: set[tuple[object, ...]] = field(default_factory=set)
    _dropped: set[int] = field(default_factory=set)

    def before(self, statement: ast.stmt, *texts: str, inside: bool = False) -> None:
        """Put lines before a statement; `inside` a block that begins with it, else outside."""
        self._alone(statement)
        line = first_line(statement)
        self._add(_Lines(line, _INSIDE if inside else _BEFORE, self.syntax.indent(statement), texts, line))

    def after(self, statement: ast.stmt, *texts: str) -> None:
        """Put lines after a statement."""
        self._alone(statement)
        line = end_line(statement)
        self._add(_Lines(line + 1, _AFTER, self.syntax.indent(statement), texts, line))

    def wrap(self, first: ast.stmt, last: ast.stmt, header: str) -> None:
        """Move statements of one block under a header such as `with x:`."""
        self._alone(first)
        self._alone(last)
        self._wraps.append(_Wrap(first_line(first), end_line(last), header, self.syntax.indent(first), self.syntax.unit(first)))

    def replace(self, node: ast.AST, text: str) -> None:
        """Another text for a node."""
        start, end = self.span(node)
        self.put(start, end, text)

    def put(self, start: int, end: int, text: str) -> None:
        """Another text between two offsets in bytes; the same edit twice is one edit."""
        if (start, end, text) not in self._replaced:
            self._replaced.append((start, end, text))

    def drop(self, statement: ast.stmt) -> None:
        """Take out a statement with its lines and the comments right above it."""
        self._alone(statement)
        first = first_line(statement)
        while first > 1 and self.syntax.lines[first - 2].lstrip().startswith(b"#"):
            first -= 1
        self._dropped.update(range(first, end_line(statement) + 1))
        self.put(self._offset(first), self._offset(end_line(statement) + 1), "")

    def replaced_receiver(self, start: int, end: int, text: str) -> None:
        """Another text for what a method is called on; a later edit of the same span goes around an earlier one."""
        self._replaced = [r for r in self._replaced if r[:2] != (start, end)]
        self.put(start, end, text)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node begins and ends, in bytes from the start of the file."""
        start = self._offset(getattr(node, "lineno", 1)) + int(getattr(node, "col_offset", 0))
        return start, self._offset(getattr(node, "end_lineno", 1)) + int(getattr(node, "end_col_offset", 0))

    def text(self) -> str:
        """The file after the edits."""
        raw = "\n".join(line.decode() for line in self.syntax.lines).encode()
        out: list[bytes] = []
        position = 0
        for start, end, text in self._pieces():
            out += [raw[position:start], text.encode()]
            position = end
        return b"".join([*out, raw[position:]]).decode()

    def edits(self) -> list[Edit]:
        """The edits one by one, each at its lines and columns."""
        return [Edit(*self._place(start), *self._place(end), text) for start, end, text in self._pieces()]

    def _pieces(self) -> list[tuple[int, int, str]]:
        """What is replaced by what, in bytes from the start of the file, in order; of what overlaps the first.

        What is put in at one place is one piece.
        """
        found: list[tuple[int, int, str]] = []
        for start, _, _, end, text in sorted([*self._inserted(), *((s, 9, 0, e, text) for s, e, text in self._replaced)]):
            if found and start == end and found[-1][:2] == (start, end):
                found[-1] = (start, end, found[-1][2] + text)
            elif not found or start >= found[-1][1]:
                found.append((start, end, text))
        return found

    def _place(self, offset: int) -> tuple[int, int]:
        line = next(n for n in range(len(self.syntax.lines), 0, -1) if self._offset(n) <= offset)
        return line, len(self.syntax.lines[line - 1][: offset - self._offset(line)].decode())

    def _inserted(self) -> list[tuple[int, int, int, int, str]]:
        found: list[tuple[int, int, int, int, str]] = []
        for number, item in enumerate(self._lines):
            indent = item.indent + self._around(item)
            self._insert(found, item.line, item.rank, number, "".join(f"{indent}{t}\n" if t else "\n" for t in item.texts))
        for wrap in self._wraps:
            outer = "".join(w.unit for w in self._wraps if w is not wrap and _holds(w, wrap))
            self._insert(found, wrap.first, _HEADER, -wrap.last, f"{wrap.indent}{outer}{wrap.header}\n")
            for line in range(wrap.first, wrap.last + 1):
                moves = line not in self.syntax.inside_strings and line not in self._dropped
                if self.syntax.lines[line - 1].strip() and moves:
                    self._insert(found, line, _UNIT, 0, wrap.unit)
        return found

    def _insert(self, found: list[tuple[int, int, int, int, str]], line: int, rank: int, order: int, text: str) -> None:
        if line > len(self.syntax.lines):
            text = "\n" + text.rstrip("\n")
        offset = self._offset(line)
        found.append((offset, rank, order, offset, text))

    def _around(self, item: _Lines) -> str:
        inside = item.rank == _INSIDE
        units = (
            w.unit
            for w in self._wraps
            if (w.first <= item.anchor < w.last if item.rank == _AFTER else w.first < item.anchor <= w.last)
            or (inside and w.first == item.anchor)
        )
        return "".join(units)

    def _offset(self, line: int) -> int:
        lines = self.syntax.lines
        return sum(len(text) + 1 for text in lines[: line - 1]) - (1 if line > len(lines) else 0)

    def _alone(self, statement: ast.stmt) -> None:
        if not self.syntax.has_lines_alone(statement):
            raise NotSure("several statements stand on one line", statement.lineno)

    def _add(self, item: _Lines) -> None:
        key = (item.line, item.rank, item.texts)
        if key not in self._said:
            self._said.add(key)
            self._lines.append(item)


def _holds(outer: _Wrap, inner: _Wrap) -> bool:
    return outer.first <= inner.first and inner.last <= outer.last and (outer.first, outer.last) != (inner.first, inner.last)
