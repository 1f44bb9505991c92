"""Expressions of the imagined run."""

from __future__ import annotations

import ast
import builtins
import operator
from collections.abc import Callable

from halfstep.events.vocabulary import HostRead
from halfstep.imagine.arithmetic import arithmetic, evened
from halfstep.imagine.comparing import UNUSUAL
from halfstep.imagine.comprehensions import Comprehensions
from halfstep.imagine.naming import hinted
from halfstep.imagine.values import (
    NO_TAGS,
    Bound,
    External,
    Function,
    Instance,
    Items,
    Scope,
    Stream,
    Tensor,
    Thing,
    Truth,
    Unknown,
    Value,
    counted,
    derive,
    part_of,
    settled,
    tagged,
    tags_of,
)

BUILTINS = frozenset(dir(builtins))


class Expressions(Comprehensions):
    """Evaluates expressions."""

    def eval(self, node: ast.expr) -> Value:
        """The value of an expression."""
        self.spend()
        handler = EXPRESSIONS.get(type(node))
        return handler(self, node) if handler is not None else Unknown("?")

    def constant(self, node: ast.Constant) -> Value:
        """A literal."""
        return node.value

    def name(self, node: ast.Name) -> Value:
        """A name, looked up as Python would; a name nobody defines is unknown."""
        scope: Scope | None = self.scope
        while scope is not None:
            if node.id in scope.names:
                return scope.names[node.id]
            scope = scope.outer
        if node.id in self.module.scope.names:
            return self.module.scope.names[node.id]
        if node.id in BUILTINS:
            return External(f"builtins.{node.id}")
        return self.memo.setdefault(("name", node.id), hinted(node.id, Unknown(node.id)))

    def attribute(self, node: ast.Attribute) -> Value:
        """`value.name`."""
        return self.getattr(self.eval(node.value), node.attr, node)

    # --- containers ---

    def sequence(self, node: ast.List | ast.Tuple | ast.Set) -> Value:
        """A list, tuple or set display."""
        values: list[Value] = []
        for element in node.elts:
            if isinstance(element, ast.Starred):
                inner = settled(self.call(External("builtins.list"), [self.eval(element.value)], {}, element))
                values.extend(inner if isinstance(inner, (list, tuple)) else [inner])
            else:
                values.append(self.eval(element))
        return tuple(values) if isinstance(node, ast.Tuple) else values

    def dictionary(self, node: ast.Dict) -> Value:
        """A dict display."""
        made: dict[Value, Value] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.eval(item)
            if key is None:
                made.update(value if isinstance(value, dict) else {"**": value})
                continue
            name = settled(self.eval(key))
            try:
                made[name] = hinted(name, value) if isinstance(name, str) else value
            except TypeError:
                made[f"{key.lineno}:{key.col_offset}"] = value
        self.memo["written", id(made)], self.memo["alive", id(made)] = self.place(node), made
        return made

    def joined(self, node: ast.JoinedStr) -> Value:
        """An f-string, as far as it is known."""
        parts: list[str] = []
        tags, loaders = NO_TAGS, frozenset[Thing]()
        for piece in node.values:
            if isinstance(piece, ast.Constant):
                parts.append(str(piece.value))
            elif isinstance(piece, ast.FormattedValue):
                value = self.unwrap_truth(self.eval(piece.value))
                if isinstance(shown := settled(value), Tensor):
                    self.emit(HostRead, piece, what="format", scaled=shown.scaler is not None, device=shown.device)
                tags |= tags_of(value)
                loaders |= getattr(settled(value), "loaders", loaders)
                parts.append(str(value) if isinstance(value, (str, int, float)) else "?")
        text = "".join(parts)
        return Unknown(f"'{text}'", tags, loaders=loaders) if loaders or tags & {"rank"} else text

    def subscript(self, node: ast.Subscript) -> Value:
        """`value[key]`."""
        value = settled(self.eval(node.value))
        if isinstance(node.slice, ast.Slice):
            return self.sliced(value, node.slice, node)
        key = self.unwrap_truth(settled(self.eval(node.slice)))
        if isinstance(value, dict):
            return self.looked_up(value, key, node)
        self.share_out(value, key)
        if isinstance(value, (list, tuple, str)):
            if isinstance(key, int) and -len(value) <= key < len(value):
                return value[key]
            return value[0] if value and not isinstance(value, str) else Unknown("?[]", tags_of(value))
        if isinstance(value, Tensor):
            return derive(value, copied=value.copied)
        if isinstance(value, Unknown):
            text = repr(key) if isinstance(key, (str, int)) else ast.unparse(node.slice)
            made = Unknown(f"{value.name}[{text}]", (value.tags | tags_of(key)) - {"loaded"}, loaders=value.loaders)
            return value.children.setdefault(f"[{text}]", hinted(key, made) if isinstance(key, str) else made)
        if isinstance(value, Thing):
            return self.item_of_thing(value, key, node)
        if isinstance(value, Instance):
            method = value.cls.lookup("__getitem__")
            if isinstance(method, Function):
                return self.call(Bound(value, "__getitem__", method), [key], {}, node)
        if isinstance(value, External) and value.path == "os.environ":
            return self.call(External("os.getenv"), [key], {}, node)
        if isinstance(value, Stream):
            return Unknown("?[]")
        return Unknown(f"{ast.unparse(node)[:40]}", tags_of(value))

    def item_of_thing(self, thing: Thing, key: Value, node: ast.AST) -> Value:
        """An item of a library object."""
        raise NotImplementedError

    def looked_up(self, table: dict[Value, Value], key: Value, node: ast.AST) -> Value:
        """An item of a dict; an unknown key opens a world for each of the first few keys."""
        if isinstance(key, Unknown):
            keys = tuple(k for k in table if isinstance(k, (str, bool)))[:4]
            if not keys:
                return Unknown(f"?[{key.name}]", key.tags)
            usual = keys.index(key.default) if key.has_default and key.default in keys else 0
            bound = self.memo.get(("eq", key.name))
            chosen = bound if bound in keys else self.world.choose(key.name, keys, usual, "flag", self.place(node))
            self.memo[("eq", key.name)] = chosen
            return table[chosen]
        try:
            if key in table:
                return table[key]
        except TypeError:
            pass
        if isinstance(key, str) and table and all(isinstance(v, Tensor) for v in table.values()):
            return derive(next(iter(table.values())))
        return Unknown(f"?[{key!r}]"[:40], tags_of(table)) if isinstance(key, (str, int)) else Unknown("?[]", tags_of(table))

    def sliced(self, value: Value, cut: ast.Slice, node: ast.Subscript) -> Value:
        """A slice; a stride by rank is noted as a shard."""
        parts = [settled(self.eval(p)) if p is not None else None for p in (cut.lower, cut.upper, cut.step)]
        by_rank = "rank" in tags_of(parts[0]) and parts[2] is not None
        self.share_out(value, parts)
        if "world" in tags_of(parts[1]) and parts[2] is None and isinstance(value, (list, Unknown, Tensor)):
            return evened(value, tags_of(parts) & {"rank"})
        if ("shard", id(value)) in self.memo and parts[1] is not None and not tags_of(parts) & {"rank", "index"}:
            self.forget(self.memo.pop(("shard", id(value))))
            return evened(value, frozenset({"rank"}))
        if isinstance(value, (list, tuple, str)) and all(p is None or isinstance(p, int) for p in parts):
            got = value[slice(*parts)] if parts[2] != 0 else value
            if isinstance(value, Items):
                made = part_of(list(got))
                made.loader, made.over = value.loader, value.over
                return made
            return part_of(list(got)) if isinstance(value, list) else got
        if by_rank and parts[1] is None and "even" not in (value.tags if isinstance(value, Items) else tags_of(value)):
            return self.shard(tags_of(value), node)
        if isinstance(value, Tensor):
            return derive(value, tags=value.tags | tags_of(parts), rows=_rows_of(value, parts), copied=value.copied)
        if isinstance(value, (list, tuple)):
            made = part_of(list(value), value)
            made.tags |= tags_of(parts) & {"rank", "world"}
            return made
        return Unknown(
            f"{ast.unparse(node)[:40]}",
            tags_of(value) | tags_of(parts) | {"part"},
            loaders=getattr(value, "loaders", frozenset()),
        )

    # --- operators ---

    def binary(self, node: ast.BinOp) -> Value:
        """`left op right`."""
        return arithmetic(self, settled(self.eval(node.left)), node.op, settled(self.eval(node.right)), node)

    def unary(self, node: ast.UnaryOp) -> Value:
        """`not x`, `-x`."""
        value = settled(self.eval(node.operand))
        if isinstance(node.op, ast.Not):
            mask = not value.models if isinstance(value, Tensor) else isinstance(value, Unknown) and value.name == "condition"
            if mask and not UNUSUAL.search(text := ast.unparse(node.operand)[:80]):
                return Truth(not self.on_data(text, True, node, "synced" in value.tags), value.tags)
            if isinstance(value, (Unknown, Tensor, Truth)) or tags_of(value):
                return Truth(not self.truth(value, node.operand), tags_of(value))
            return not self.truth(value, node.operand)
        if isinstance(value, Tensor):
            return derive(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            operators: dict[type, Callable[[Value], Value]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
            return tagged(operators.get(type(node.op), operator.neg)(value), tags_of(value))
        return Unknown(f"-{ast.unparse(node.operand)[:80]}", value.tags) if isinstance(value, Unknown) else Unknown("-?")

    def boolean(self, node: ast.BoolOp) -> Value:
        """`and` and `or`, with what the answer depends on."""
        is_and = isinstance(node.op, ast.And)
        tags = NO_TAGS
        value: Value = None
        for index, part in enumerate(node.values):
            with self.guarded(tags if is_and else NO_TAGS):
                value = self.eval(part)
            if index == len(node.values) - 1:
                break
            truth = self.truth(value, part)
            tags |= tags_of(value)
            if truth != is_and:
                break
        if tags and isinstance(self.unwrap_truth(value), bool):
            return Truth(self.truth(value, node), tags | tags_of(value))
        if tags and isinstance(settled(value), (Unknown, Tensor)) and is_and:
            return Truth(self.truth(value, node), tags | tags_of(value))
        return value

    # --- others ---

    def conditional(self, node: ast.IfExp) -> Value:
        """`a if test else b`."""
        test = self.eval(node.test)
        taken = self.truth(test, node.test)
        return counted(self.eval(node.body if taken else node.orelse), tags_of(test))

    def function_literal(self, node: ast.Lambda) -> Value:
        """A lambda."""
        return Function(node, self.scope, self.module, "<lambda>", defaults=[self.eval(d) for d in node.args.defaults])

    def call_node(self, node: ast.Call) -> Value:
        """A call: function, arguments, keywords."""
        func = self.eval(node.func)
        args: list[Value] = []
        for arg in node.args:
            if isinstance(arg, ast.Starred):
                inner = settled(self.eval(arg.value))
                args.extend(inner if isinstance(inner, (list, tuple)) else [inner])
            else:
                args.append(self.eval(arg))
        kwargs: dict[str, Value] = {}
        for keyword in node.keywords:
            value = self.eval(keyword.value)
            if keyword.arg is not None:
                kwargs[keyword.arg] = value
            elif isinstance(value, dict):
                kwargs.update({k: v for k, v in value.items() if isinstance(k, str)})
            else:
                kwargs["**"] = value
        return self.call(func, args, kwargs, node)

    def delegate(self, source: Value, receive: Callable[[Value], Value], node: ast.YieldFrom) -> None:
        """`yield from source`."""
        raise NotImplementedError

    def walrus(self, node: ast.NamedExpr) -> Value:
        """`name := value`."""
        value = self.eval(node.value)
        self.bind(node.target, value)
        return value

    def yielded(self, node: ast.Yield | ast.YieldFrom) -> Value:
        """`yield value`, handed to whoever runs the generator."""
        value = self.eval(node.value) if node.value is not None else None
        receive = self.yields[-1]
        if isinstance(node, ast.YieldFrom) and receive is not None:
            return self.delegate(settled(value), receive, node)
        return receive(value) if receive is not None else None

    def inner(self, node: ast.Starred | ast.Await) -> Value:
        """`*value`, `await value`."""
        return self.eval(node.value)


def _rows_of(value: Tensor, cut: list[Value]) -> int | None:
    """How many rows a slice of a tensor has, where that is known."""
    known = value.rows is not None and all(p is None or isinstance(p, int) for p in cut) and cut[2] != 0
    return len(range(value.rows or 0)[slice(*cut)]) if known else None


EXPRESSIONS: dict[type[ast.expr], Callable[..., Value]] = {
    ast.Constant: Expressions.constant,
    ast.Name: Expressions.name,
    ast.Attribute: Expressions.attribute,
    ast.List: Expressions.sequence,
    ast.Tuple: Expressions.sequence,
    ast.Set: Expressions.sequence,
    ast.Dict: Expressions.dictionary,
    ast.JoinedStr: Expressions.joined,
    ast.Subscript: Expressions.subscript,
    ast.BinOp: Expressions.binary,
    ast.UnaryOp: Expressions.unary,
    ast.BoolOp: Expressions.boolean,
    ast.Compare: Expressions.compare,
    ast.IfExp: Expressions.conditional,
    ast.Lambda: Expressions.function_literal,
    ast.Call: Expressions.call_node,
    ast.ListComp: Expressions.comprehension,
    ast.SetComp: Expressions.comprehension,
    ast.GeneratorExp: Expressions.comprehension,
    ast.DictComp: Expressions.comprehension,
    ast.NamedExpr: Expressions.walrus,
    ast.Await: Expressions.inner,
    ast.Yield: Expressions.yielded,
    ast.YieldFrom: Expressions.yielded,
    ast.Starred: Expressions.inner,
}
"""Handlers by kind of expression."""
