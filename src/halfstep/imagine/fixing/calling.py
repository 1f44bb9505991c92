"""Fixes within an expression: arguments, what is called, what is divided."""

from __future__ import annotations

import ast
import re

from halfstep.events.vocabulary import Place
from halfstep.findings.finding import Edit, FixRequest
from halfstep.imagine.converting.patch import Patch
from halfstep.imagine.converting.reach import add_arguments
from halfstep.imagine.edits import Editor


def keyword(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """An argument `name=value` of a call is added, or gets another value."""
    call = editor.call(request.place)
    name, _, value = request.text.partition("=")
    if call is None or any(k.arg is None for k in call.keywords) or any(isinstance(a, ast.Starred) for a in call.args):
        return None
    given = next((k.value for k in call.keywords if k.arg == name), None)
    if given is None and request.position is not None and len(call.args) > request.position:
        given = call.args[request.position]
    if given is not None:
        return [editor.swap(given, value)]
    patch = Patch(editor.syntax)
    add_arguments(patch, call, request.text)
    return patch.edits()


def drop_keyword(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A call loses the argument that is named."""
    call = editor.call(request.place)
    given = next((k for k in call.keywords if k.arg == request.text), None) if call is not None else None
    if call is None or given is None:
        return None
    nodes: list[ast.expr | ast.keyword] = sorted([*call.args, *call.keywords], key=lambda n: (n.lineno, n.col_offset))
    index = nodes.index(given)
    if index:
        before = nodes[index - 1]
        line, column = before.end_lineno or 0, before.end_col_offset or 0
        return [_span(editor, line, column, given.end_lineno or 0, given.end_col_offset or 0)]
    after = nodes[1] if len(nodes) > 1 else None
    if after is not None:
        return [_span(editor, given.lineno, given.col_offset, after.lineno, after.col_offset)]
    return [_span(editor, given.lineno, given.col_offset, given.end_lineno or 0, given.end_col_offset or 0)]


def _span(editor: Editor, line: int, column: int, end_line: int, end_column: int) -> Edit:
    return Edit(line, editor.column(line, column), end_line, editor.column(end_line, end_column), "")


def call_wrapper(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """`model.module(x)` becomes `model(x)`."""
    call = editor.call(request.place)
    if call is None or not isinstance(call.func, ast.Attribute) or call.func.attr != "module":
        return None
    return [editor.swap(call.func, editor.syntax.text(call.func.value))]


def undivide(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """`a / b` becomes `a`."""
    node = next((n for n in editor.syntax.nodes_at(request.place) if isinstance(n, ast.BinOp)), None)
    if node is None or not isinstance(node.op, ast.Div) or isinstance(node.right, ast.BinOp):
        return None
    text = editor.syntax.text(node.left)
    parent = editor.syntax.parents[node]
    if not isinstance(node.left, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
        return [editor.swap(node, f"({text})")]
    edit = editor.swap(node, text)
    line, last = editor.lines[edit.line - 1], editor.lines[edit.end_line - 1]
    if isinstance(parent, ast.Attribute) and line[edit.column - 1 : edit.column] == "(" and last[edit.end_column :][:1] == ")":
        return [Edit(edit.line, edit.column - 1, edit.end_line, edit.end_column + 1, text)]
    return [edit]


def exchange(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """Two arguments, named in the text, take each other's place."""
    call = editor.call(request.place)
    names = re.findall(r"`([^`]+)`", request.text)
    if call is None or len(names) != 2:
        return None
    values = [*call.args, *(k.value for k in call.keywords)]
    found = [[v for v in values if ast.unparse(v).rsplit(".", 1)[-1] == name] for name in names]
    if any(len(f) != 1 for f in found):
        return None
    (one,), (two,) = found
    return [editor.swap(one, editor.syntax.text(two)), editor.swap(two, editor.syntax.text(one))]


def detach(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """What is put into a container leaves its graph behind."""
    call = editor.call(request.place)
    value = (
        call.args[0] if call is not None and len(call.args) == 1 and not call.keywords else _added_value(editor, request.place)
    )
    return [editor.swap(value, f"{value.id}.detach()")] if isinstance(value, ast.Name) else None


def _added_value(editor: Editor, place: Place) -> ast.expr | None:
    statement = editor.syntax.statement_at(place)
    return statement.value if isinstance(statement, ast.AugAssign) else None


def list_parameters(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """The generator of parameters that a call takes is made a list where it is made."""
    call = editor.call(request.place)
    if call is None or not call.args or not isinstance(call.args[0], ast.Name):
        return None
    function = editor.syntax.function(call)
    made = [
        n.value
        for n in ast.walk(function or editor.syntax.tree)
        if isinstance(n, ast.Assign) and any(isinstance(t, ast.Name) and t.id == call.args[0].id for t in n.targets)
    ]
    if len(made) != 1 or not isinstance(made[0], ast.Call) or not isinstance(made[0].func, ast.Attribute):
        return None
    return [editor.swap(made[0], f"list({editor.syntax.text(made[0])})")] if made[0].func.attr == "parameters" else None


def count_batches(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """`total / len(loader.dataset)` becomes `total / len(loader)`."""
    node = next((n for n in editor.syntax.nodes_at(request.place) if isinstance(n, ast.BinOp)), None)
    length = node.right if node is not None else None
    if not isinstance(length, ast.Call) or len(length.args) != 1 or not isinstance(length.args[0], ast.Attribute):
        return None
    data = length.args[0]
    return [editor.swap(data, editor.syntax.text(data.value))] if data.attr == "dataset" else None


def drop_factor(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """The function of a `LambdaLR` returns `factor` where it returned `rate * factor`."""
    call = editor.call(request.place)
    given = [*call.args[1:], *(k.value for k in call.keywords if k.arg == "lr_lambda")] if call is not None else []
    body = given[0].body if given and isinstance(given[0], ast.Lambda) else None
    if not isinstance(body, ast.BinOp) or not isinstance(body.op, ast.Mult):
        return None
    rates = [n for n in (body.left, body.right) if _is_rate(n)]
    if len(rates) != 1:
        return None
    return [editor.swap(body, editor.syntax.text(body.right if rates[0] is body.left else body.left))]


def _is_rate(node: ast.expr) -> bool:
    """Whether a factor is a learning rate: a small number, or a name that says so."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, float) and 0 < node.value <= 0.1
    return isinstance(node, (ast.Name, ast.Attribute)) and bool(re.search(r"(^|[._])(lr|learning_rate)$", ast.unparse(node)))
