"""Fixes that put statements under a header: no gradients, one rank, an update that was not skipped, no reduction."""

from __future__ import annotations

import ast

from halfstep.findings.finding import Edit, FixRequest
from halfstep.imagine.converting.syntax import bound_names, end_line, first_line, read_names
from halfstep.imagine.edits import Editor
from halfstep.imagine.facts import imported_names
from halfstep.imagine.fixing.naming import distributed


def no_grad(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A loop runs under `torch.no_grad()`."""
    loop = editor.statement(request.place)
    known = imported_names(editor.syntax.tree).get("torch") == "torch"
    return wrapped(editor, loop, loop, "with torch.no_grad():") if isinstance(loop, ast.For) and known else None


def first_rank(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A statement is for rank 0 alone."""
    statement, module = editor.statement(request.place), distributed(editor)
    if not isinstance(statement, ast.Expr) or module is None:
        return None
    return wrapped(editor, statement, statement, f"if {module}.get_rank() == 0:")


def unless_skipped(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A schedule moves only if the scaler's step before it (`other`) was applied."""
    move, step = editor.statement(request.place), editor.statement(request.other)
    call = editor.call(request.other)
    if not isinstance(move, ast.Expr) or step is None or call is None or not isinstance(call.func, ast.Attribute):
        return None
    block, index = editor.syntax.block(step)
    if move not in block[index + 1 :]:
        return None
    scaler, before = editor.syntax.text(call.func.value), editor.syntax.fresh("scale_before", "loss_scale_before")
    edits = wrapped(editor, move, move, f"if {scaler}.get_scale() >= {before}:")
    return [editor.before(step, f"{before} = {scaler}.get_scale()"), *edits] if edits is not None else None


def no_sync(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """Forward and backward passes of all but the last micro-batch of a window do not reduce."""
    backward, step = editor.statement(request.place), editor.statement(request.other)
    if backward is None or step is None:
        return None
    block, index = editor.syntax.block(backward)
    guard = next((b[i] for b, i in editor.syntax.blocks_up(step) if b is block and i > index), None)
    first = next((i for i in range(index + 1) if _calls(block[i], request.text)), None)
    if not isinstance(guard, ast.If) or step not in guard.body or first is None:
        return None
    made = set().union(*(bound_names(s) for s in block[first : index + 1]))
    calls = [n for n in ast.walk(guard.test) if isinstance(n, ast.Call) and ast.unparse(n.func) != "len"]
    if made & read_names(guard.test) or calls:
        return None
    header = f"with nullcontext() if {editor.syntax.text(guard.test)} else {request.text}.no_sync():"
    edits = wrapped(editor, block[first], backward, header)
    return [*_import(editor), *edits] if edits is not None and "\n" not in header else None


def _calls(statement: ast.stmt, model: str) -> bool:
    return any(isinstance(n, ast.Call) and ast.unparse(n.func) == model for n in ast.walk(statement))


def _import(editor: Editor) -> list[Edit]:
    if imported_names(editor.syntax.tree).get("nullcontext") == "contextlib.nullcontext":
        return []
    imports = [s for s in editor.syntax.tree.body if isinstance(s, (ast.Import, ast.ImportFrom))]
    first = next((s for s in imports if not (isinstance(s, ast.ImportFrom) and s.module == "__future__")), None)
    return [editor.before(first or editor.syntax.tree.body[0], "from contextlib import nullcontext")]


def wrapped(editor: Editor, first: ast.stmt | None, last: ast.stmt | None, header: str) -> list[Edit] | None:
    """Statements of one block move one level in, under a header."""
    if first is None or last is None or not (editor.syntax.has_lines_alone(first) and editor.syntax.has_lines_alone(last)):
        return None
    unit = editor.syntax.unit(first)
    edits: list[Edit] = []
    for line in range(first_line(first), end_line(last) + 1):
        if editor.lines[line - 1].strip() and line not in editor.syntax.inside_strings:
            start = f"{editor.syntax.indent(first)}{header}\n" if line == first_line(first) else ""
            edits.append(Edit(line, 0, line, 0, start + unit))
    return edits
