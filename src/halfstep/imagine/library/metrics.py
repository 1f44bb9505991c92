"""What a program calls the number by which it judges itself."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfstep.imagine.calls import Calls


def named(state: Calls, node: ast.expr) -> str:
    """What the program calls a number, with `-` where it is turned around, and what made it."""
    if isinstance(node, ast.IfExp):
        return named(state, node.body if state.truth(state.eval(node.test), node.test) else node.orelse)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return "-" + named(state, node.operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and isinstance(node.left, ast.Constant):
        return "-" + named(state, node.right)
    return ast.unparse(node)[:60] + (_called(state, node) if isinstance(node, ast.Name) else "")


def _gives(node: ast.Assign | ast.AugAssign, name: str) -> bool:
    return ast.unparse(node.target if isinstance(node, ast.AugAssign) else node.targets[0]) == name


def _called(state: Calls, name: ast.Name) -> str:
    """The call that gave a name its value, where it stands just before."""
    kinds = (ast.Assign, ast.AugAssign)
    given = [n for n in ast.walk(state.module.tree) if isinstance(n, kinds) and n.lineno < name.lineno and _gives(n, name.id)]
    value = max(given, key=lambda n: (n.lineno, n.col_offset)).value if given else None
    func = value.func if isinstance(value, ast.Call) else None
    return f" = {ast.unparse(func)[:40]}()" if isinstance(func, (ast.Name, ast.Attribute)) else ""
