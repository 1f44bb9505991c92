"""Outputs that leave autocast for NumPy, which has no bfloat16: they become FP32 as they were."""

from __future__ import annotations

import ast

from halfstep.imagine.converting.patch import Patch
from halfstep.imagine.converting.places import Site
from halfstep.imagine.converting.program import Program
from halfstep.imagine.converting.syntax import bound_names

FLOATING = frozenset(
    {"detach", "cpu", "data", "squeeze", "unsqueeze", "view", "reshape", "flatten", "clone", "sigmoid", "softmax", "tanh"}
)
"""Methods that leave a tensor in the dtype it has."""


def keep_arrays(program: Program, patch: Patch, site: Site, runs: list[tuple[int, int]]) -> None:
    """Write `.float()` before `.numpy()` where an output of the site's autocast regions goes there."""
    cast = {name for first, last in runs for statement in site.block[first : last + 1] for name in bound_names(statement)}
    root: ast.AST = site.function if site.function is not None else program.syntax.tree
    begin = site.block[site.first].lineno
    for node in ast.walk(root):
        if not isinstance(node, ast.Attribute) or node.attr != "numpy" or program.syntax.function(node) is not site.function:
            continue
        if _base(node.value) in cast and node.lineno > begin:
            _, end = patch.span(node.value)
            patch.put(end, end, ".float()")


def _base(node: ast.expr) -> str | None:
    """The name that a chain of methods begins with, if none of them changes the dtype."""
    while True:
        if isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Attribute) and node.attr in FLOATING:
            node = node.value
        else:
            return node.id if isinstance(node, ast.Name) else None
