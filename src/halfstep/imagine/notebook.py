"""Notebooks as one text: their code cells one after the other, and the way back."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

from halfstep.findings.finding import Edit
from halfstep.imagine.project import parse

MAGIC = re.compile(r"^(\s*)pass  # ([%!].*)$")
"""A line of the notebook's own, as it stands in the text."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A code cell: its number among all cells, from 1, and its lines in the text, the last of them not included."""

    number: int
    first: int
    end: int

    def holds(self, edit: Edit) -> bool:
        """Whether an edit changes this cell alone."""
        last = edit.end_line - 1 if edit.end_column == 0 and edit.end_line > edit.line else edit.end_line
        return self.first <= edit.line and last < self.end


def cells_of(content: str) -> tuple[str, tuple[Cell, ...]] | None:
    """The code of a notebook and its cells; None where it is no notebook."""
    try:
        cells = json.loads(content).get("cells", [])
    except (ValueError, AttributeError, RecursionError):
        return None
    lines: list[str] = []
    found: list[Cell] = []
    for number, cell in enumerate(cells if isinstance(cells, list) else [], 1):
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            own = _python(_body(cell))
            found.append(Cell(number, len(lines) + 1, len(lines) + 1 + len(own)))
            lines += own
    return "\n".join(lines), tuple(found)


def _body(cell: dict[str, object]) -> str:
    source = cell.get("source", "")
    return "".join(str(line) for line in source) if isinstance(source, list) else str(source)


def _python(body: str) -> list[str]:
    """The lines of a cell, its magics and shell lines and cells in other languages as comments."""
    lines = [_plain(line) for line in body.split("\n")]
    return lines if parse("\n".join(lines)) is not None else [f"pass  # {line}" for line in body.split("\n")]


def _plain(line: str) -> str:
    stripped = line.lstrip()
    return f"{line[: len(line) - len(stripped)]}pass  # {stripped}" if stripped[:1] in ("%", "!") else line


def moved(cells: tuple[Cell, ...], edits: list[Edit]) -> tuple[Cell, ...]:
    """The cells where they are after these edits."""
    return tuple(replace(c, first=c.first + _added(edits, c.first), end=c.end + _added(edits, c.end)) for c in cells)


def _added(edits: list[Edit], line: int) -> int:
    """How many lines come to stand before a line."""
    return sum(e.text.count("\n") - (e.end_line - e.line) for e in edits if e.line < line)


def written(content: str, text: str, cells: tuple[Cell, ...]) -> str:
    """The notebook with the cells of a text; a cell that is the same stays as it is."""
    notebook = json.loads(content)
    known = cells_of(content)
    before = known[0].split("\n") if known is not None else []
    lines = text.split("\n")
    for cell, old in zip(cells, known[1] if known is not None else (), strict=True):
        new = lines[cell.first - 1 : cell.end - 1]
        if new != before[old.first - 1 : old.end - 1]:
            body = "\n".join(MAGIC.sub(r"\1\2", line) for line in new)
            entry = notebook["cells"][cell.number - 1]
            entry["source"] = body.splitlines(keepends=True) if isinstance(entry["source"], list) else body
    indent = re.search(r"^\{\n( +|\t)", content)
    made = json.dumps(notebook, indent=indent[1] if indent else None, ensure_ascii=False)
    return made + ("\n" if content.endswith("\n") else "")
