"""How a function of the program writes the type of its device."""

from __future__ import annotations

import ast

from halfstep.events.vocabulary import Forward, Place
from halfstep.imagine.converting.program import Program
from halfstep.imagine.converting.syntax import FunctionNode


def device_type(program: Program, function: FunctionNode | None) -> str:
    """An expression for the type of the device (`"cuda"`, `"cpu"`), which holds in this function."""
    known = _literal(program)
    if known is not None:
        return f'"{known}"'
    moved = _moved_to(program)
    if moved is not None:
        return (
            moved
            if moved.startswith('"') or _is_visible(program, moved, function)
            else _used_in(program, function) or _of_model(program)
        )
    return _used_in(program, function) or ('"cpu"' if not _mentions_devices(program) else _of_model(program))


def _literal(program: Program) -> str | None:
    calls = [n for n in ast.walk(program.syntax.tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    moves = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "cuda"]
    return "cuda" if moves and not any(_device_argument(program, c) for c in calls) else None


def _moved_to(program: Program) -> str | None:
    """The device that the trained model was moved to, as it is written there."""
    for event in program.all(Forward):
        made = program.usual.made(event.model)
        inner = made.facts.get("inner") if made is not None else None
        origin = next((program.usual.made(m) for m in (inner, event.model) if m is not None and program.usual.made(m)), None)  # type: ignore[arg-type]
        place = origin.facts.get("moved at") if origin is not None else None
        call = program.syntax.call_at(place) if isinstance(place, Place) else None
        argument = _device_argument(program, call) if call is not None else None
        if argument is not None:
            return _as_type(program, argument)
    return None


def _device_argument(program: Program, call: ast.Call) -> ast.expr | None:
    """What a call of `.to` names as its device."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "to":
        for value in [*call.args[:1], *(k.value for k in call.keywords if k.arg == "device")]:
            if not ast.unparse(value).startswith("torch.") or ast.unparse(value).startswith("torch.device"):
                return value
    return None


def _as_type(program: Program, node: ast.expr) -> str:
    text = program.syntax.text(node)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return f'"{node.value.split(":")[0]}"'
    if isinstance(node, ast.Call):
        return f"{text}.type"
    return f"{text}.type" if _is_device_object(program, text) else f"torch.device({text}).type"


def _is_device_object(program: Program, text: str) -> bool:
    """Whether every value that the file gives to a name is made by `torch.device`."""
    values = [
        node.value
        for node in ast.walk(program.syntax.tree)
        if isinstance(node, ast.Assign) and any(ast.unparse(t) == text for t in node.targets)
    ]
    return bool(values) and all(isinstance(v, ast.Call) and ast.unparse(v.func) in ("torch.device", "device") for v in values)


def _is_visible(program: Program, text: str, function: FunctionNode | None) -> bool:
    """Whether an expression written somewhere can be read in a function."""
    inner = text.removeprefix("torch.device(")
    name = inner.split(".")[0].split(")")[0].split("[")[0]
    if name in ("self", "cls"):
        return function is not None and bool(function.args.args) and function.args.args[0].arg == name
    scope: ast.AST | None = function
    while True:
        if name in _names_of(program, scope):
            return True
        if scope is None:
            return False
        scope = program.syntax.function(scope)


def _names_of(program: Program, scope: ast.AST | None) -> set[str]:
    """The names that a function or the module gives values to, with its parameters."""
    root = scope if scope is not None else program.syntax.tree
    nodes = [n for n in ast.walk(root) if program.syntax.function(n) is scope]
    found = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        found |= {a.arg for a in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)}
    return found


def _used_in(program: Program, function: FunctionNode | None) -> str | None:
    """The device that something is moved to in this function, or by an attribute in another method of its class."""
    owner = program.syntax.owner(function)
    for root in (function if function is not None else program.syntax.tree, owner):
        for node in ast.walk(root) if root is not None else ():
            argument = _device_argument(program, node) if isinstance(node, ast.Call) else None
            own = program.syntax.function(node) is function and isinstance(argument, (ast.Name, ast.Attribute, ast.Constant))
            if argument is not None and (own or ast.unparse(argument).startswith("self.")):
                return _as_type(program, argument)
    return None


def _of_model(program: Program) -> str:
    for event in program.all(Forward):
        call = program.syntax.call_at(event.place)
        if call is not None and event.grad_enabled and isinstance(call.func, (ast.Name, ast.Attribute)):
            return f"next({program.syntax.text(call.func)}.parameters()).device.type"
    return '"cuda" if torch.cuda.is_available() else "cpu"'


def _mentions_devices(program: Program) -> bool:
    return any(
        (isinstance(n, ast.Attribute) and n.attr in ("cuda", "to", "device") and ast.unparse(n) != "torch.cuda")
        or (isinstance(n, (ast.Name, ast.arg)) and "device" in (n.id if isinstance(n, ast.Name) else n.arg))
        or (isinstance(n, ast.keyword) and n.arg == "device")
        for n in ast.walk(program.syntax.tree)
    )
