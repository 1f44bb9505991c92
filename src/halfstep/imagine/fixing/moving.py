"""Fixes that take a statement out, or to another place."""

from __future__ import annotations

import ast

from halfstep.events.vocabulary import Place
from halfstep.findings.finding import Edit, FixRequest
from halfstep.imagine.converting.syntax import Block, bound_names, end_line, first_line, read_names
from halfstep.imagine.edits import Editor


def delete_again(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """Take out a statement that another one (`other`) does before it on every way there."""
    statement, first = _simple(editor, request.place), _simple(editor, request.other)
    if statement is None or first is None:
        return None
    block, index = editor.syntax.block(first)
    led = any(other is block and at > index for other, at in editor.syntax.blocks_up(statement))
    return [editor.cut(statement)] if led and len(editor.syntax.block(statement)[0]) > 1 else None


def delete_early(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """Take out a statement that another one (`other`) of its block does after it."""
    statement, last = _simple(editor, request.place), _simple(editor, request.other)
    if statement is None or last is None:
        return None
    block, index = editor.syntax.block(statement)
    return [editor.cut(statement)] if last in block[index + 1 :] else None


def move_after(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A statement goes behind another, or behind what holds that, if nothing between needs what it makes."""
    statement = _simple(editor, request.place)
    block, index, target = _within(editor, statement, request.other)
    if statement is None or target <= index or not _whole(editor, block[target]):
        return None
    if any(read_names(other) & bound_names(statement) for other in block[index + 1 : target + 1]):
        return None
    return [editor.after(block[target], *_lines(editor, statement)), editor.cut(statement)]


def move_before(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A statement goes before another, or before what holds that, if nothing between makes what it needs."""
    statement = _simple(editor, request.place)
    block, index, target = _within(editor, statement, request.other)
    if statement is None or not 0 <= target < index or not _whole(editor, block[target]):
        return None
    passed = block[target:index]
    if any(bound_names(other) & (read_names(statement) | bound_names(statement)) for other in passed):
        return None
    return [editor.before(block[target], *_lines(editor, statement)), editor.cut(statement)]


def move_into(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A statement goes to the end of the `if` that holds another."""
    inner = _inner(editor, request)
    statement = _simple(editor, request.place)
    return (
        None
        if inner is None or statement is None
        else _moved(editor, statement, editor.after(inner[-1], *_lines(editor, statement)))
    )


def move_into_before(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A statement goes into the `if` that holds another, right before that."""
    inner = _inner(editor, request)
    statement, target = _simple(editor, request.place), editor.statement(request.other)
    if inner is None or statement is None or target is None:
        return None
    return _moved(editor, statement, editor.before(target, *_lines(editor, statement)))


def move_all_into(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A statement, and those from it to the `if` that holds another, go to the beginning of that `if`."""
    inner = _inner(editor, request)
    block, index, target = _within(editor, _simple(editor, request.place), request.other)
    moved = block[index:target]
    if inner is None or not moved or not all(isinstance(s, ast.Expr) and _whole(editor, s) for s in moved):
        return None
    lines = [line for statement in moved for line in _lines(editor, statement)]
    return [editor.before(inner[0], *lines), *(editor.cut(statement) for statement in moved)]


def hoist(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """What a loop makes anew in every turn is made before the loop, if nothing of it depends on the turn."""
    statement = _simple(editor, request.place)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return None
    loop = editor.syntax.parents[statement]
    if not isinstance(loop, (ast.For, ast.While)) or statement not in loop.body or len(loop.body) < 2 or not _whole(editor, loop):
        return None
    call = statement.value
    if any(isinstance(n, (ast.Call, ast.NamedExpr)) for n in ast.walk(call) if n is not call):
        return None
    others = [loop.target] if isinstance(loop, ast.For) else []
    changed = set().union(*(bound_names(n) for n in [*others, *(s for s in loop.body if s is not statement)]))
    attributes = {ast.unparse(n) for n in ast.walk(loop) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    read = {ast.unparse(n) for n in ast.walk(call) if isinstance(n, ast.Attribute)}
    if changed & (read_names(call) | bound_names(statement)) or read & attributes:
        return None
    return [editor.before(loop, *_lines(editor, statement)), editor.cut(statement)]


def _simple(editor: Editor, place: Place | None) -> ast.stmt | None:
    found = editor.simple(place)
    return found if found is not None and _whole(editor, found) else None


def _whole(editor: Editor, statement: ast.stmt) -> bool:
    """Whether a statement can be moved with its lines, none of which begins within a text."""
    lines = range(first_line(statement), end_line(statement) + 1)
    return editor.syntax.has_lines_alone(statement) and not editor.syntax.inside_strings.intersection(lines)


def _lines(editor: Editor, statement: ast.stmt) -> list[str]:
    """The lines of a statement without its indentation."""
    indent = editor.syntax.indent(statement)
    return [line.removeprefix(indent) for line in editor.lines[first_line(statement) - 1 : end_line(statement)]]


def _within(editor: Editor, statement: ast.stmt | None, place: Place | None) -> tuple[Block, int, int]:
    """The block of a statement, its index there and that of the statement that holds a place, -1 where none does."""
    other = editor.syntax.statement_at(place) if place is not None else None
    if statement is None or other is None:
        return [], 0, -1
    block, index = editor.syntax.block(statement)
    return block, index, next((at for found, at in editor.syntax.blocks_up(other) if found is block), -1)


def _inner(editor: Editor, request: FixRequest) -> Block | None:
    """The body of the `if` beside the statement to be moved, where the other stands."""
    block, index, target = _within(editor, _simple(editor, request.place), request.other)
    other = editor.statement(request.other)
    guard = block[target] if target >= 0 and target != index else None
    if not isinstance(guard, ast.If) or other is None or other not in guard.body or not _whole(editor, guard.body[-1]):
        return None
    lower, upper = min(index, target), max(index, target)
    made = set().union(*(bound_names(s) for s in block[lower : upper + 1]))
    return guard.body if not made & read_names(block[index]) or lower + 1 == upper else None


def _moved(editor: Editor, statement: ast.stmt, put: Edit) -> list[Edit] | None:
    return [put, editor.cut(statement)] if isinstance(statement, ast.Expr) else None
