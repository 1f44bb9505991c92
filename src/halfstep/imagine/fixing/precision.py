"""Fixes of what is computed in which number format, on which device, from which seed."""

from __future__ import annotations

import ast
import re

from halfstep.findings.finding import Edit, FixRequest
from halfstep.imagine.converting.syntax import is_plain
from halfstep.imagine.edits import Editor
from halfstep.imagine.facts import imported_names
from halfstep.imagine.fixing.naming import distributed, sees


def with_logits(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """`bce(sigmoid(x), y)` becomes the form that takes `x` itself."""
    call = editor.call(request.place)
    score = call.args[0] if call is not None and call.args else None
    if call is None or not isinstance(score, ast.Call) or not isinstance(score.func, (ast.Attribute, ast.Name)):
        return None
    if ast.unparse(score.func).rsplit(".", 1)[-1] != "sigmoid":
        return None
    inner = score.args[0] if score.args else score.func.value if isinstance(score.func, ast.Attribute) else score
    taken = editor.swap(score, editor.syntax.text(inner))
    if ast.unparse(call.func).endswith("binary_cross_entropy"):
        return [taken, editor.swap(call.func, f"{editor.syntax.text(call.func)}_with_logits")]
    made = _made_once(editor, call.func)
    if not isinstance(made, ast.Call) or not ast.unparse(made.func).endswith("BCELoss"):
        return None
    return [taken, editor.swap(made.func, editor.syntax.text(made.func).replace("BCELoss", "BCEWithLogitsLoss"))]


def _made_once(editor: Editor, name: ast.expr) -> ast.expr | None:
    """The only value that a name gets, if it is called at one place only."""
    text = ast.unparse(name)
    nodes = list(ast.walk(editor.syntax.tree))
    values = [n.value for n in nodes if isinstance(n, ast.Assign) and any(ast.unparse(t) == text for t in n.targets)]
    calls = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == text]
    return values[0] if len(values) == 1 and len(calls) == 1 else None


def to_float(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """What is reduced is made FP32 first."""
    node = next((n for n in editor.syntax.nodes_at(request.place) if isinstance(n, (ast.BinOp, ast.Call))), None)
    if isinstance(node, ast.BinOp):
        operand: ast.expr | None = node.left
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        module = imported_names(editor.syntax.tree).get(ast.unparse(node.func.value)) is not None
        operand = (node.args[0] if node.args else None) if module else node.func.value
    else:
        return None
    if operand is None or isinstance(operand, ast.Constant):
        return None
    text = editor.syntax.text(operand)
    return [editor.swap(operand, f"{text}.float()" if is_plain(operand) else f"({text}).float()")]


def device_of_model(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A device that is written out becomes the one that the program has chosen, if there is one such variable."""
    call, statement = editor.call(request.place), editor.statement(request.place)
    literal = next((a for a in _values(call) if isinstance(a, ast.Constant) and isinstance(a.value, str)), None)
    chosen = [
        n
        for n in ast.walk(editor.syntax.tree)
        if isinstance(n, ast.Assign) and len(n.targets) == 1 and "is_available()" in ast.unparse(n.value)
    ]
    if literal is None or statement is None or len(chosen) != 1 or not isinstance(chosen[0].targets[0], ast.Name):
        return None
    name = chosen[0].targets[0].id
    made = isinstance(chosen[0].value, ast.Call) and ast.unparse(chosen[0].value.func).endswith("device")
    text_like = made or isinstance(chosen[0].value, ast.IfExp)
    return [editor.swap(literal, f"{name}.type" if made else name)] if text_like and sees(editor, name, statement) else None


def _values(call: ast.Call | None) -> list[ast.expr]:
    return [*call.args[:1], *(k.value for k in call.keywords if k.arg == "device_type")] if call is not None else []


def seed_of_worker(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A worker is seeded with what torch gave it instead of with a constant."""
    call = editor.call(request.place)
    if call is None or len(call.args) != 1 or imported_names(editor.syntax.tree).get("torch") != "torch":
        return None
    return [editor.swap(call.args[0], "torch.initial_seed() % 2**32")]


def seed_of_rank(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """Each rank draws from a seed of its own, where the model was wrapped (`other`) before the seed is set."""
    call, wrapped, module = editor.call(request.place), editor.statement(request.other), distributed(editor)
    statement = editor.statement(request.place)
    if call is None or statement is None or wrapped is None or module is None or len(call.args) != 1 or call.keywords:
        return None
    block, index = editor.syntax.block(wrapped)
    seed = call.args[0]
    if statement not in block[index + 1 :] or not isinstance(seed, (ast.Constant, ast.Name, ast.Attribute)):
        return None
    return [editor.swap(seed, f"{editor.syntax.text(seed)} + {module}.get_rank()")]


def keep_fp32(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """The model in the text is not cast to half precision, where nothing else of the program is cast to fit it."""
    casts = [n for n in ast.walk(editor.syntax.tree) if isinstance(n, ast.Call) and _casts(n)]
    if len(casts) != 1 or len(casts[0].args) + len(casts[0].keywords) > 1 or not isinstance(casts[0].func, ast.Attribute):
        return None
    call, model = casts[0], casts[0].func.value
    statement = editor.syntax.statement(call)
    named = ast.unparse(model).rsplit(".", 1)[-1] == request.text
    targets = [ast.unparse(t) for t in statement.targets] if isinstance(statement, ast.Assign) and statement.value is call else []
    if not named and request.text not in targets:
        return None
    if targets == [ast.unparse(model)] or (isinstance(statement, ast.Expr) and statement.value is call):
        alone = editor.syntax.has_lines_alone(statement) and len(editor.syntax.block(statement)[0]) > 1
        return [editor.cut(statement)] if alone else None
    return [editor.swap(call, editor.syntax.text(model))]


HALF = re.compile(r"(^|\.)(half|float16|bfloat16)$")


def _casts(call: ast.Call) -> bool:
    """Whether a call casts to half precision, by its name or its arguments."""
    values = [*call.args, *(k.value for k in call.keywords)]
    return any(HALF.search(ast.unparse(n)) for n in (call.func, *values) if isinstance(n, (ast.Attribute, ast.Name)))
