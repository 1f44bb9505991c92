"""Comparisons and truth in the imagined run: where flags, ranks and data ask for an answer of this world."""

from __future__ import annotations

import ast
import re

from halfstep.events.vocabulary import Report, ScaleRead
from halfstep.imagine.arithmetic import compare_numbers, small_count
from halfstep.imagine.naming import usually_off
from halfstep.imagine.state import State
from halfstep.imagine.values import (
    NO_TAGS,
    Bound,
    Class,
    External,
    Function,
    Instance,
    Items,
    Module,
    Partial,
    Scope,
    Stream,
    Tensor,
    Thing,
    Truth,
    Unknown,
    Value,
    derive,
    settled,
    tags_of,
)

UNUSUAL = re.compile(r"inf|nan|bad|skip|over|stop|done|fail|err", re.I)
"""What people call conditions on data that seldom hold; of others (`not keep.any()`) the negation is what seldom holds."""


class Comparing(State):
    """Compares values and decides what is true."""

    def compare(self, node: ast.Compare) -> Value:
        """A chain of comparisons."""
        left = settled(self.eval(node.left))
        result: Value = True
        tags = NO_TAGS
        for op, other in zip(node.ops, node.comparators, strict=True):
            right = settled(self.eval(other))
            result = self.compare_pair(left, op, right, node)
            if len(node.ops) == 1:
                return result
            tags |= tags_of(result)
            if not self.truth(result, node):
                break
            left = right
        return Truth(self.truth(result, node), tags) if tags else self.truth(result, node)

    def compare_pair(self, left: Value, op: ast.cmpop, right: Value, node: ast.Compare) -> Value:
        """One comparison."""
        tags = tags_of(left) | tags_of(right)
        if isinstance(op, (ast.Is, ast.IsNot)) or (isinstance(op, (ast.Eq, ast.NotEq)) and (left is None or right is None)):
            return self.is_none(left, op, right, node)
        left, right = self.unwrap_truth(left), self.unwrap_truth(right)
        if "scale" in tags:
            self.emit(ScaleRead, node)
        if isinstance(op, (ast.In, ast.NotIn)):
            return self.contains(left, op, right, node)
        if "total" in tags and right == 0 and tags & {"data", "batch size"} and isinstance(op, (ast.Gt, ast.NotEq, ast.Eq)):
            return not isinstance(op, ast.Eq)  # a sum over batches is zero only if nothing was added
        if _some(left, op, right) and not UNUSUAL.search(text := ast.unparse(node)[:80]):
            return Unknown(text, tags | {"data"}, normal=True, loaders=getattr(left, "loaders", frozenset()))
        if isinstance(left, Tensor) or isinstance(right, Tensor):
            parents = [v for v in (left, right) if isinstance(v, Tensor)]
            return derive(*parents, grad=False, dtype="bool", tags=tags | {"data"})
        everywhere = _same_on_all_ranks(left, op, right)
        if everywhere is not None:
            return everywhere
        left, right = self._as_rank(left, node), self._as_rank(right, node)
        if {"world", "option"} <= tags and 1 in (left, right):
            alone = compare_numbers(left, op, right)
            return Truth(self.flag(ast.unparse(node)[:80], bool(alone), node), tags)
        found = compare_numbers(left, op, right)
        if found is not None and "counted" in tags and isinstance(op, (ast.Gt, ast.GtE)) and "modulo" not in tags:
            return Unknown(ast.unparse(node)[:80], tags)
        if found is not None:
            return Truth(found, tags) if tags else found
        return self.compare_unknown(left, op, right, node)

    def _as_rank(self, value: Value, node: ast.AST) -> Value:
        """The rank of this world, if that is what a value is."""
        return self.rank(node) if _is_rank(value) else value

    def compare_unknown(self, left: Value, op: ast.cmpop, right: Value, node: ast.Compare) -> Value:
        """A comparison whose sides are not both known: a flag, or a condition on data."""
        if isinstance(left, int) and isinstance(right, Unknown) and "divisor" in right.tags:
            return self.compare_pair(left, op, small_count(right), node)
        tags = tags_of(left) | tags_of(right)
        if "batch size" in tags and (right == 0 or (left == 0 and isinstance(op, (ast.Eq, ast.NotEq)))):
            some = isinstance(op, (ast.Gt, ast.NotEq))
            return Unknown(ast.unparse(node)[:80], tags | {"data"}, normal=some, loaders=getattr(left, "loaders", frozenset()))
        if isinstance(left, Unknown) and _too_long(left, op, right):
            return Unknown(ast.unparse(node)[:80], tags | {"data"}, normal=False, loaders=left.loaders)
        negated = isinstance(op, ast.NotEq)
        if isinstance(op, (ast.Eq, ast.NotEq)) and isinstance(left, Unknown) and isinstance(right, (str, External, int)):
            literal = right.path if isinstance(right, External) else right
            return Truth(self.equals(left, literal, node) != negated, tags)
        if isinstance(left, External) and isinstance(right, External):
            return (left.path == right.path) != negated
        for loader in getattr(left, "loaders", frozenset()):
            self.emit(Report, node, loader=loader, kind="comparison")
        text = ast.unparse(node)[:80]
        usual = isinstance(op, (ast.Gt, ast.GtE)) and not usually_off(text)
        return Unknown(text, tags, default=usual, has_default=True, loaders=getattr(left, "loaders", frozenset()))

    def equals(self, value: Unknown, literal: object, node: ast.AST) -> bool:
        """Whether an unknown value is this literal in this world."""
        bound = self.memo.get(("eq", value.name))
        if bound is not None:
            return bool(bound == literal)
        if "data" in value.tags:
            return self.on_data(f"{value.name} == {literal!r}", False, node, "synced" in value.tags)
        usual = value.has_default and value.default == literal
        answer = self.flag(f"{value.name} == {literal!r}", usual, node)
        if answer:
            self.memo[("eq", value.name)] = literal
        return answer

    def is_none(self, left: Value, op: ast.cmpop, right: Value, node: ast.AST) -> Value:
        """`x is None` and its like."""
        negated = isinstance(op, (ast.IsNot, ast.NotEq))
        value = right if left is None else left
        if left is not None and right is not None:
            same = left is right or (isinstance(left, External) and isinstance(right, External) and left.path == right.path)
            return same != negated
        if _is_rank(value) and not value.has_default:
            return negated  # every rank has its number
        if isinstance(value, Unknown):
            read = "loaded" in value.tags or ("data" in value.tags and not value.has_default)
            given = read or self.truth_of_unknown(value, node)
            return Truth((not given) != negated, value.tags)
        return (value is None) != negated

    def contains(self, left: Value, op: ast.cmpop, right: Value, node: ast.AST) -> Value:
        """`x in y`."""
        negated = isinstance(op, ast.NotIn)
        if "caught" in tags_of(right):
            return not negated  # the exception is the one that is asked for
        by_data = isinstance(right, Items) and (right.filtered or right.loader is not None)
        if isinstance(left, (str, int, Thing, Instance)) and not by_data:
            if isinstance(right, str):
                return (isinstance(left, str) and left in right) != negated
            if isinstance(right, (list, tuple, dict)):
                return any(settled(item) == left for item in right) != negated
        if isinstance(left, Unknown) and "rank" in left.tags and isinstance(right, (list, tuple)):
            return Truth((self.rank(node) in right) != negated, left.tags)
        text = ast.unparse(node) if isinstance(node, ast.expr) else "?"
        return Unknown(text[:80], tags_of(left) | tags_of(right), default=False, has_default=True)

    def truth(self, value: Value, node: ast.AST) -> bool:
        """Whether a value is true in this world."""
        value = settled(value)
        if isinstance(value, Truth):
            return value.value
        if isinstance(value, Unknown):
            return self.truth_of_unknown(value, node)
        if isinstance(value, Tensor):
            return self.on_data(_text(node), False, node, "synced" in value.tags)
        if isinstance(value, (Thing, Instance, Function, Class, External, Module, Bound, Partial, Stream, Scope)):
            return True
        if isinstance(value, Items) and value.filtered:
            return self.on_data(_text(node), True, node, False)
        return bool(value)

    def truth_of_unknown(self, value: Unknown, node: ast.AST) -> bool:
        """Whether an unknown value is true (or given) in this world."""
        if value.thing is not None:
            return True
        if "rank" in value.tags and not value.has_default and "data" not in value.tags:
            return self.rank(node) != 0
        if "main" in value.tags:
            return self.rank(node) == 0
        if "total" in value.tags and "batch size" in value.tags:
            return True
        if "data" in value.tags:
            return self.on_data(value.name, value.normal, node, "synced" in value.tags)
        if "batch size" in value.tags and not value.has_default:
            return self.on_data(value.name, True, node, False)
        usual = bool(value.default) if value.has_default else not usually_off(value.name)
        kind = "device" if "device" in value.tags else "flag"
        return self.flag(value.name, usual, node, kind)


def _too_long(left: Unknown, op: ast.cmpop, right: Value) -> bool:
    """Whether it is asked if a micro-batch is longer than a limit, as some are."""
    size = left.name == "batch size" or left.name.startswith("shape[")
    return size and isinstance(op, (ast.Gt, ast.GtE)) and isinstance(right, int) and right > 2


def _is_rank(value: Value) -> bool:
    return isinstance(value, Unknown) and "rank" in value.tags and "data" not in value.tags


def _same_on_all_ranks(left: Value, op: ast.cmpop, right: Value) -> bool | None:
    """The answer where every rank gives the same: `rank != -1` asks whether there are ranks."""
    if _is_rank(left) and isinstance(right, int):
        answers = {compare_numbers(rank, op, right) for rank in (0, 1, 7)}
    elif _is_rank(right) and isinstance(left, int):
        answers = {compare_numbers(left, op, rank) for rank in (0, 1, 7)}
    else:
        return None
    return answers.pop() if len(answers) == 1 else None


def _some(left: Value, op: ast.cmpop, right: Value) -> bool:
    """Whether it is asked if a number of the data is above zero, as it usually is."""
    of_data = isinstance(left, Tensor) or (isinstance(left, Unknown) and "data" in left.tags)
    return of_data and right == 0 and isinstance(op, (ast.Gt, ast.NotEq)) and not isinstance(right, (Tensor, Unknown))


def _text(node: ast.AST) -> str:
    return ast.unparse(node)[:80] if isinstance(node, ast.expr) else "?"
