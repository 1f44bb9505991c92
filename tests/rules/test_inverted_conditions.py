"""Every rule is held by its card: with one of its conditions inverted, the example is silent, or what to use instead is not."""

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from types import CodeType

import pytest

from halfstep.events.trace import Story
from halfstep.findings.registry import Check, Rule, all_rules
from halfstep.imagine.project import parse
from halfstep.imagine.story import tell
from halfstep.rules.judge import judge


class _Inverted(ast.NodeTransformer):
    """Inverts the condition of this number."""

    def __init__(self, number: int) -> None:
        self.number, self.seen = number, 0

    def _turned(self, test: ast.expr) -> ast.expr:
        self.seen += 1
        return ast.copy_location(ast.UnaryOp(ast.Not(), test), test) if self.seen - 1 == self.number else test

    def visit_If(self, node: ast.If) -> ast.AST:
        node.test = self._turned(node.test)
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        node.test = self._turned(node.test)
        return self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        node.ifs = [self._turned(test) for test in node.ifs]
        return self.generic_visit(node)


@cache
def _story(text: str) -> Story:
    tree = parse(text)
    assert tree is not None
    return tell(tree, "example.py")


def _variants(rule: Rule) -> Iterator[CodeType]:
    """The rule's module with each of its conditions inverted in turn."""
    source = inspect.getsource(sys.modules[rule.check.__module__])
    number = 0
    while True:
        inverted = _Inverted(number)
        tree = ast.fix_missing_locations(inverted.visit(ast.parse(source)))
        if number >= inverted.seen:
            return
        yield compile(tree, "inverted.py", "exec")
        number += 1


def _is_held(rule: Rule, code: CodeType) -> bool:
    names: dict[str, object] = {"__name__": rule.check.__module__}
    exec(code, names)
    check: Check = names["check"]  # type: ignore[assignment]
    inverted = Rule(rule.card, check)
    try:
        return bool(judge(_story(rule.card.instead), (inverted,))) or not judge(_story(rule.card.example), (inverted,))
    except Exception:  # whatever the inverted rule meets: its card's test fails of it, too
        return True


RULES = [rule for rule in all_rules() if next(_variants(rule), None) is not None]
"""All but those that only report what the interpreter has found."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.card.name)
def test_inverted_condition_is_noticed(rule: Rule) -> None:
    assert not _is_held(rule, compile(inspect.getsource(sys.modules[rule.check.__module__]), "same.py", "exec"))
    assert any(_is_held(rule, code) for code in _variants(rule))
