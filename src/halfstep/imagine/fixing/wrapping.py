"""Fixes that put statements under a header: no gradients, one rank, an update that was not skipped, no reduction."""

from __future__ import annotations

import ast

from halfstep.findings.finding import Edit, FixRequest
from halfstep.imagine.converting.imports import ensure
from halfstep.imagine.converting.patch import Patch
from halfstep.imagine.converting.syntax import bound_names, read_names
from halfstep.imagine.edits import Editor
from halfstep.imagine.facts import imported_names
from halfstep.imagine.fixing.naming import distributed


def no_grad(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A loop runs under `torch.no_grad()`."""
    loop = editor.statement(request.place)
    known = imported_names(editor.syntax.tree).get("torch") == "torch"
    return _wrapped(editor, loop, loop, "with torch.no_grad():") if isinstance(loop, ast.For) and known else None


def first_rank(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A statement is for rank 0 alone."""
    statement, module = editor.statement(request.place), distributed(editor)
    if not isinstance(statement, ast.Expr) or module is None:
        return None
    return _wrapped(editor, statement, statement, f"if {module}.get_rank() == 0:")


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
    patch = Patch(editor.syntax)
    patch.before(step, f"{before} = {scaler}.get_scale()")
    patch.wrap(move, move, f"if {scaler}.get_scale() >= {before}:")
    return patch.edits()


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
    return _wrapped(editor, block[first], backward, header)


def sync_at_step(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """What is not reduced (`place`) is decided by the question that leads to the step (`other`)."""
    step = editor.statement(request.other)
    guard = editor.syntax.parents.get(step) if step is not None else None
    choice = next((n for n in editor.syntax.nodes_at(request.place) if isinstance(n, ast.IfExp)), None)
    if step is None or choice is None or not isinstance(guard, ast.If) or step not in guard.body:
        return None
    statement, test = editor.syntax.statement(choice), editor.syntax.text(guard.test)
    block, index = editor.syntax.block(guard)
    led = next((i for b, i in editor.syntax.blocks_up(statement) if b is block and i < index), None)
    if led is None or "\n" in test or set().union(*(bound_names(s) for s in block[led:index])) & read_names(guard.test):
        return None
    one, other = editor.syntax.text(choice.body), editor.syntax.text(choice.orelse)
    quiet, reduced = (one, other) if one.endswith(".no_sync()") else (other, one)
    return [editor.swap(choice, f"{reduced} if {test} else {quiet}")] if quiet.endswith(".no_sync()") else None


def widen_no_sync(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """`no_sync()` around a backward pass holds the forward passes of the model in the text as well."""
    backward = editor.statement(request.place)
    inner = editor.syntax.parents.get(backward) if backward is not None else None
    if backward is None or not isinstance(inner, ast.With) or inner.body != [backward] or len(inner.items) != 1:
        return None
    context, outer = editor.syntax.text(inner.items[0].context_expr), editor.syntax.parents[inner]
    held: ast.stmt = inner
    if isinstance(outer, ast.If) and outer.body == [inner]:
        if [ast.unparse(s) for s in outer.orelse] != [ast.unparse(backward)]:
            return None
        held, context = outer, f"{context} if {editor.syntax.text(outer.test)} else nullcontext()"
    block, index = editor.syntax.block(held)
    first = next((i for i in range(index) if _calls(block[i], request.text)), None)
    if first is None or "\n" in context or not editor.syntax.has_lines_alone(held):
        return None
    if set().union(*(bound_names(s) for s in block[first:index])) & read_names(held.test if isinstance(held, ast.If) else inner):
        return None
    patch = Patch(editor.syntax)
    if "nullcontext" in context:
        ensure(patch, "from contextlib import nullcontext")
    patch.wrap(block[first], held, f"with {context}:")
    patch.replace(held, editor.syntax.text(backward))
    return patch.edits()


def _calls(statement: ast.stmt, model: str) -> bool:
    return any(isinstance(n, ast.Call) and ast.unparse(n.func) == model for n in ast.walk(statement))


def _wrapped(editor: Editor, first: ast.stmt, last: ast.stmt, header: str) -> list[Edit] | None:
    """Statements of one block move one level in, under a header."""
    patch = Patch(editor.syntax)
    if "nullcontext" in header:
        ensure(patch, "from contextlib import nullcontext")
    patch.wrap(first, last, header)
    return patch.edits() if "\n" not in header else None
