"""Whether what a call is given changes from one turn of the loop around it to the next."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeGuard

Loop = ast.For | ast.AsyncFor | ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


def varies(call: ast.expr, tree: ast.Module) -> bool:
    """Whether the innermost loop around a call runs over something that its arguments are made of."""
    around = [node for node in ast.walk(tree) if _is_loop(node) and _holds(node, call)]
    if not around:
        return False
    loop = min(around, key=lambda node: (node.end_lineno or 0) - node.lineno)
    changing = _targets(loop)
    for made, value in _assignments(loop):
        if changing & _names(value):
            changing |= made
    return bool(changing & _names(call))


def _is_loop(node: ast.AST) -> TypeGuard[Loop]:
    return isinstance(node, Loop)


def _holds(loop: Loop, call: ast.expr) -> bool:
    return loop.lineno <= call.lineno <= (loop.end_lineno or 0) and any(node is call for node in ast.walk(loop))


def _targets(loop: Loop) -> set[str]:
    if isinstance(loop, (ast.For, ast.AsyncFor)):
        return _names(loop.target)
    return {name for generator in loop.generators for name in _names(generator.target)}


def _assignments(loop: Loop) -> Iterator[tuple[set[str], ast.AST]]:
    """What is assigned within a loop, in the order of the text."""
    for node in sorted((node for node in ast.walk(loop) if isinstance(node, ast.stmt)), key=lambda node: node.lineno):
        if isinstance(node, ast.Assign):
            yield {name for target in node.targets for name in _names(target)}, node.value
        elif isinstance(node, (ast.For, ast.AsyncFor)) and node is not loop:
            yield _names(node.target), node.iter


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
