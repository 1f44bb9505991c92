"""Fixes that add what is missing: the epoch, the mode, the device, a state in a checkpoint."""

from __future__ import annotations

import ast

from halfstep.findings.finding import Edit, FixRequest
from halfstep.imagine.converting.checkpoints import add_item
from halfstep.imagine.converting.patch import Patch
from halfstep.imagine.converting.syntax import end_line
from halfstep.imagine.edits import Editor
from halfstep.imagine.facts import imported_names
from halfstep.imagine.fixing.naming import assigned, sees


def set_epoch(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """The sampler made at `other` is told the number that a loop over epochs counts."""
    loop, sampler = editor.statement(request.place), assigned(editor, request.other)
    made = editor.call(request.other)
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name) or sampler is None or made is None:
        return None
    if loop.target.id.startswith("_") or not sees(editor, sampler, loop, made) or not _counts(loop.iter):
        return None
    return [editor.before(loop.body[0], f"{sampler}.set_epoch({loop.target.id})")]


def _counts(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and "range" in ast.unparse(node)


def evaluate(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A loop over validation data runs in evaluation mode; `back` in the text: the mode is set back after it."""
    loop, model = _loop_and_model(editor, request)
    if loop is None:
        return None
    return [editor.before(loop, f"{model}.eval()"), *([editor.after(loop, f"{model}.train()")] if request.text == "back" else [])]


def train(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A loop over training data, or one pass in it, runs in training mode."""
    loop, model = _loop_and_model(editor, request)
    return [editor.before(loop, f"{model}.train()")] if loop is not None else None


def _loop_and_model(editor: Editor, request: FixRequest) -> tuple[ast.stmt | None, str]:
    """A loop or another statement, and the model as it is called in it (at `other`)."""
    loop, call = editor.statement(request.place), editor.call(request.other)
    if loop is None or call is None or editor.syntax.function(call) is not editor.syntax.function(loop):
        return None, ""
    inside = loop.lineno <= call.lineno <= end_line(loop)
    plain = isinstance(call.func, ast.Name) or (isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name))
    return (loop, ast.unparse(call.func)) if inside and plain else (None, "")


def set_device(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """Each process chooses its GPU right after the process group is made."""
    statement, call = editor.statement(request.place), editor.call(request.place)
    known = imported_names(editor.syntax.tree).get("torch") == "torch"
    if not isinstance(statement, ast.Expr) or call is None or not isinstance(call.func, ast.Attribute) or not known:
        return None
    module = editor.syntax.text(call.func.value)
    return [editor.after(statement, f"torch.cuda.set_device({module}.get_rank() % torch.cuda.device_count())")]


def save_state(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """The state of what is called at `other` goes into the checkpoint that holds the optimizer's; the text is its key."""
    saved, call = editor.call(request.place), editor.call(request.other)
    if saved is None or call is None or not isinstance(call.func, ast.Attribute):
        return None
    name = editor.syntax.text(call.func.value)
    states = _states(editor, saved)
    if not sees(editor, name, saved, _home(editor, name, call)) or len(states) != 1:
        return None
    patch = Patch(editor.syntax)
    add_item(patch, *states[0], request.text, name)
    return patch.edits()


def _home(editor: Editor, name: str, call: ast.Call) -> ast.AST | None:
    """A node of the function that made what a call names, None where that cannot be told."""
    if name.startswith("self."):
        return call
    stored = [
        n for n in ast.walk(editor.syntax.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id == name
    ]
    return stored[0] if len(stored) == 1 else call


def _states(editor: Editor, saved: ast.Call) -> list[tuple[ast.expr, ast.expr]]:
    """The items of the optimizer's state in the dictionaries of the function that saves."""
    function = editor.syntax.function(saved)
    found: list[tuple[ast.expr, ast.expr]] = []
    for node in ast.walk(function or editor.syntax.tree):
        if isinstance(node, ast.Dict) and editor.syntax.function(node) is function:
            found += [(k, v) for k, v in zip(node.keys, node.values, strict=True) if k is not None and _is_optimizer(k, v)]
    return found


def _is_optimizer(label: ast.expr, value: ast.expr) -> bool:
    state = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "state_dict"
    return state and isinstance(label, ast.Constant) and isinstance(label.value, str) and "opt" in label.value
