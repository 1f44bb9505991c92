"""The interpreter of the imagined run, put together; and what a loop runs over."""

from __future__ import annotations

import ast

from halfstep.imagine.calls import Calls
from halfstep.imagine.cursors import Cursor, collected
from halfstep.imagine.expressions import Expressions
from halfstep.imagine.statements import Statements
from halfstep.imagine.values import (
    NO_TAGS,
    Bound,
    Function,
    Instance,
    Items,
    Stream,
    Tensor,
    Thing,
    Unknown,
    Value,
    derive,
    model_of,
    settled,
    tagged,
    tags_of,
)

MAX_LEAVES = 40
"""Layers of a model whose parameters are told apart by their names."""


class Interpreter(Calls, Statements, Expressions):
    """Walks a program as Python would, with small numbers and one world's answers."""

    def items(self, source: Value, node: ast.AST, body: list[ast.stmt] | None = None) -> Items:
        """What a loop over `source` runs over."""
        source = settled(source)
        if isinstance(source, Stream):
            return self._of_stream(source).rest()
        if isinstance(source, Cursor):
            return source.rest()
        if isinstance(source, Items):
            return self._batches_in(source, node)
        if isinstance(source, (list, tuple)):
            return self._of_list(list(source)[:64], source, node)
        if isinstance(source, dict):
            return Items(list(source)[:64])
        if isinstance(source, Thing):
            return self._of_thing(source, node)
        if isinstance(source, Instance):
            return self._of_instance(source, node)
        if isinstance(source, Tensor):
            return Items([derive(source) for _ in range(min(source.rows or 4, 32))])
        if isinstance(source, str):
            return Items(list(source)[:8])
        if isinstance(source, Unknown):
            return self._of_unknown(source, node)
        return Items([Unknown("item") for _ in range(2)])

    def _of_stream(self, stream: Stream) -> Cursor:
        made = collected(self, stream)
        if made.loader is None and not made.endless and len(made) > 1 and _batch_like(made[0]):
            key = ("stream", id(stream.function.node))
            made.loader, made.over = self._named_loader(key, stream.function.name), "loader"
        return made

    def _endless(self, element: Value) -> Items:
        made = Items([element] * (2 * self.micro_batches))
        made.endless = True
        return made

    def _of_list(self, values: list[Value], source: Value, node: ast.AST) -> Items:
        made = Items(values)
        if len(values) > 1 and any(_batch_like(v) for v in values[:2]):
            made.over = "loader"
            made.loader = self._named_loader(("list", id(source)), _text(node))
            made.loader.facts.setdefault("length", len(values))
            self.memo[("alive", id(source))] = source
            made.tags = frozenset({"part"}) if ("gathered", id(source)) in self.memo else NO_TAGS
        return made

    def _batches_in(self, source: Items, node: ast.AST) -> Items:
        """Items as they are; a part of a list of micro-batches is run over as all of it would be."""
        if not source.tags & {"part", "alike"} or source.over != "items":
            return source
        made = self._of_list(list(source), source, node)
        made.tags = source.tags
        return made

    def _named_loader(self, key: object, name: str) -> Thing:
        if key not in self.memo:
            self.memo[key] = self.make("loader", None, name=name, given=True)
        found = self.memo[key]
        assert isinstance(found, Thing)
        return found

    def batches(self, loader: Thing) -> Items:
        """The micro-batches of a loader."""
        element = frozenset({loader})
        made = Items([Tensor(loaders=element, name="batch", tags=tags_of(loader)) for _ in range(self.batches_of(loader))])
        made.over, made.loader = "loader", loader
        return made

    def _of_thing(self, source: Thing, node: ast.AST) -> Items:
        if source.kind == "loader":
            return self.batches(source)
        if source.kind == "params":
            return self._of_params(source)
        if source.kind == "dataset":
            return self.batches(self._named_loader(("dataset", source.number), source.name or _text(node)))
        if source.kind == "model":
            layers = source.facts.get("layers")
            return Items(list(layers)) if isinstance(layers, list) else Items()
        if source.kind == "defaultdict":
            return Items(list(source.facts.get("table", {})))
        return Items([Unknown("item") for _ in range(2)])

    def _of_params(self, source: Thing) -> Items:
        if source.facts.get("generator") and source.facts.get("used"):
            return Items()
        made = Items()
        owners = list(source.owners) or [source]
        for owner in owners[:8]:
            leaves = self._leaves(owner) if source.facts.get("named") else []
            if 2 < len(leaves) <= MAX_LEAVES:
                made.extend(
                    (f"{name}.{part}", self._param_of(leaf, part)) for name, leaf in leaves for part in ("weight", "bias")
                )
                continue
            param = self.memo.get(("param of", owner)) or self.make("param", None)
            self.memo["param of", owner] = param
            param.owners = {owner} if owner.kind == "model" else set()
            made.append(("name", param) if source.facts.get("named") else param)
        return made

    def _leaves(self, model: Thing, depth: int = 0) -> list[tuple[str, Thing]]:
        """The layers of a model of the program, by their names; none where some cannot be told."""
        instance, layers = model.facts.get("instance"), model.facts.get("layers")
        parts = instance.attrs if isinstance(instance, Instance) else dict(enumerate(layers)) if isinstance(layers, list) else {}
        found: list[tuple[str, Thing]] = []
        for name, value in parts.items() if depth < 6 else ():
            registered = isinstance(value, (list, dict)) and ("registers", id(value)) in self.memo
            held = list(value.items() if isinstance(value, dict) else enumerate(value)) if registered else [("", value)]
            for key, child in held:
                layer = model_of(child)
                full = f"{name}.{key}".rstrip(".")
                inner = self._leaves(layer, depth + 1) if layer is not None else []
                found += [(f"{full}.{rest}", leaf) for rest, leaf in inner]
                found += [(full, layer)] if layer is not None and not inner else []
        return found

    def _param_of(self, layer: Thing, part: str) -> Thing:
        """One parameter of a layer, always the same one."""
        param = self.memo.get(("param of", layer, part)) or self.make("param", None)
        self.memo["param of", layer, part] = param
        param.owners, param.facts["layer"] = {layer}, True
        assert isinstance(param, Thing)
        return param

    def _of_instance(self, source: Instance, node: ast.AST) -> Items:
        method = source.cls.lookup("__iter__")
        if isinstance(method, Function):
            got = self.call(Bound(source, "__iter__", method), [], {}, node)
            return self.items(got, node) if got is not source else self._endless(Unknown("item"))
        if isinstance(source.cls.lookup("__getitem__"), Function):
            return self.batches(self._named_loader(("instance", id(source)), source.cls.name))
        return Items([Unknown("item") for _ in range(2)])

    def _of_unknown(self, source: Unknown, node: ast.AST) -> Items:
        if source.loaders or source.tags & {"batch size"}:
            return Items([Unknown(f"{source.name}[]", source.tags, loaders=source.loaders) for _ in range(2)])
        loader = self._named_loader(("unknown", source.name), source.name)
        if not loader.facts.get("tags") and source.tags:
            loader.facts["tags"] = source.tags
        if "strided" in source.tags:
            loader.facts["strided"] = True
        made = self.batches(loader)
        made.tags = source.tags & {"part"}
        return made


def _text(node: ast.AST) -> str:
    return ast.unparse(node)[:60] if isinstance(node, ast.expr) else ""


def _batch_like(value: Value, depth: int = 0) -> bool:
    value = settled(value)
    if isinstance(value, Tensor):
        return not value.grad
    if isinstance(value, (tuple, list)) and depth < 2:
        return bool(value) and any(_batch_like(v, depth + 1) for v in value[:3])
    return isinstance(value, dict) and depth < 2 and any(_batch_like(v, depth + 1) for v in list(value.values())[:3])


__all__ = ["Interpreter", "tagged"]
