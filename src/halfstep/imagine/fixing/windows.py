"""Fixes of accumulation: the test that ends a window, and the division by its size."""

from __future__ import annotations

import ast

from halfstep.findings.finding import Edit, FixRequest
from halfstep.imagine.converting.syntax import bound_names, is_plain, quotient, read_names
from halfstep.imagine.edits import Editor
from halfstep.imagine.fixing.naming import sees


def step_at_end(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """The window also ends with the last batch of the loader."""
    found = _boundary(editor, request)
    if found is None:
        return None
    guard, loop, counted, start, loader = found
    if _remainder(guard.test) is None or start not in (0, 1) or _is_repeated(guard, loop):
        return None
    last = f"{counted} + 1" if start == 0 else counted
    return [editor.swap(guard.test, f"{editor.syntax.text(guard.test)} or {last} == len({loader})")]


def count_from_one(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """`i % n` becomes `(i + 1) % n` where `i` counts from 0."""
    found = _boundary(editor, request)
    if found is None:
        return None
    guard, loop, counted, start, _ = found
    parts = guard.test.values if isinstance(guard.test, ast.BoolOp) and isinstance(guard.test.op, ast.Or) else [guard.test]
    counts = [m.left for m in map(_remainder, parts) if m is not None]
    if (
        start != 0
        or len(counts) != 1
        or _is_repeated(guard, loop)
        or not isinstance(counts[0], ast.Name)
        or counts[0].id != counted
    ):
        return None
    return [editor.swap(counts[0], f"({counted} + 1)")]


def divide(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """The loss of a micro-batch is divided by the size of the window that the step (`other`) ends."""
    found, call = _boundary(editor, FixRequest("", request.other)) if request.other else None, editor.call(request.place)
    if found is None or call is None or not isinstance(call.func, ast.Attribute) or call.func.attr != "backward":
        return None
    guard, loop, *_ = found
    sizes = [m.right for m in map(_remainder, ast.walk(guard.test)) if m is not None]
    if len(sizes) != 1 or not isinstance(sizes[0], (ast.Name, ast.Attribute)) or read_names(sizes[0]) & bound_names(loop):
        return None
    if editor.syntax.function(call) is not editor.syntax.function(loop):
        return None
    loss, size = call.func.value, editor.syntax.text(sizes[0])
    scaled = isinstance(loss, ast.Call) and isinstance(loss.func, ast.Attribute) and loss.func.attr == "scale"
    if isinstance(loss, ast.Call) and scaled and len(loss.args) == 1:
        return [editor.swap(loss.args[0], quotient(editor.syntax, loss.args[0], size))]
    if isinstance(loss, (ast.Name, ast.Attribute, ast.Call)):
        return [editor.swap(loss, f"({quotient(editor.syntax, loss, size)})")]
    return None


def divide_by_window(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """The loss is divided by the micro-batches that its window has: fewer in the last one, which the step (`other`) ends."""
    found = _boundary(editor, FixRequest("", request.other)) if request.other else None
    node = next((n for n in editor.syntax.nodes_at(request.place) if isinstance(n, (ast.BinOp, ast.AugAssign))), None)
    if found is None or node is None:
        return None
    guard, loop, counted, start, loader = found
    size = node.right if isinstance(node, ast.BinOp) else node.value
    sizes = [m.right for m in map(_remainder, ast.walk(guard.test)) if m is not None]
    if len(sizes) != 1 or ast.unparse(sizes[0]) != ast.unparse(size) or read_names(size) & bound_names(loop):
        return None
    if start not in (0, 1) or not isinstance(size, (ast.Name, ast.Attribute, ast.Constant)):
        return None
    if editor.syntax.function(node) is not editor.syntax.function(loop):
        return None
    text, turn = editor.syntax.text(size), counted if start == 0 else f"({counted} - 1)"
    return [editor.swap(size, f"min({text}, len({loader}) - {turn} // {text} * {text})")]


LENGTHS = ("total_iters", "T_max", "total_steps", "num_training_steps")


def count_steps(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A schedule's length in micro-batches is divided by the size of the window that the step (`other`) ends."""
    found, call = _boundary(editor, FixRequest("", request.other)) if request.other else None, editor.call(request.place)
    length = next((k.value for k in call.keywords if k.arg in LENGTHS), None) if call is not None else None
    statement = editor.statement(request.place)
    if found is None or length is None or statement is None:
        return None
    sizes = [m.right for m in map(_remainder, ast.walk(found[0].test)) if m is not None]
    if (
        len(sizes) != 1
        or not isinstance(sizes[0], (ast.Name, ast.Attribute))
        or not sees(editor, ast.unparse(sizes[0]), statement)
    ):
        return None
    text = editor.syntax.text(length)
    product = isinstance(length, ast.BinOp) and isinstance(length.op, ast.Mult)
    plain = product or is_plain(length)
    return [editor.swap(length, f"{text if plain else f'({text})'} // {ast.unparse(sizes[0])}")]


def _remainder(node: ast.AST) -> ast.BinOp | None:
    """The division of `a % n == 0`."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq):
        return None
    zero = isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value == 0
    return node.left if zero and isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Mod) else None


def _boundary(editor: Editor, request: FixRequest) -> tuple[ast.If, ast.For, str, int, str] | None:
    """The `if` around a step, the loop over `enumerate(loader)` around that, its counter from where, and its loader."""
    step = editor.statement(request.place)
    guard = editor.syntax.parents.get(step) if step is not None else None
    loop = editor.syntax.parents.get(guard) if guard is not None else None
    if not isinstance(guard, ast.If) or step not in guard.body or not isinstance(loop, ast.For) or guard not in loop.body:
        return None
    call, target = loop.iter, loop.target
    if not isinstance(call, ast.Call) or ast.unparse(call.func) != "enumerate" or not isinstance(target, ast.Tuple):
        return None
    source, index = call.args[0] if call.args else None, target.elts[0]
    given = [*call.args[1:], *(k.value for k in call.keywords)]
    start = given[0].value if given and isinstance(given[0], ast.Constant) else None if given else 0
    if not isinstance(source, (ast.Name, ast.Attribute)) or not isinstance(index, ast.Name) or not isinstance(start, int):
        return None
    return guard, loop, index.id, start, editor.syntax.text(source)


def _is_repeated(guard: ast.If, loop: ast.For) -> bool:
    """Whether another test of the loop counts in windows as well, and would go on as before."""
    own = set(ast.walk(guard.test))
    return any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) and n not in own for n in ast.walk(loop))
