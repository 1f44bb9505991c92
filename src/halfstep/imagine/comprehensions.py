"""Comprehensions of the imagined run."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable

from halfstep.imagine.comparing import Comparing
from halfstep.imagine.state import State
from halfstep.imagine.values import Items, Scope, Thing, Value, settled, tags_of


class Comprehensions(Comparing):
    """Runs comprehensions."""

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
        """A comprehension, run like the loop that it is."""
        outer = self.scope
        self.scope = Scope({}, outer, self.module)
        made: list[Value] = []
        keyed: dict[Value, Value] = {}

        def collect() -> None:
            if isinstance(node, ast.DictComp):
                key = settled(self.eval(node.key))
                value = self.eval(node.value)
                with contextlib.suppress(TypeError):
                    keyed[key] = value
            else:
                made.append(self.eval(node.elt))

        try:
            self._generate(node.generators, collect)
        finally:
            self.scope = outer
        if isinstance(node, ast.DictComp):
            return keyed
        if made and self.by_data(node.generators):
            made = Items(made)
            made.filtered = True
        if made and any(("dealt", id(each)) in self.memo for each in node.generators):
            return self.dealt(made, node)
        return generator_of(self, made) if isinstance(node, ast.GeneratorExp) else made

    def by_data(self, generators: list[ast.comprehension]) -> bool:
        """Whether a condition of a comprehension was one on data."""
        lines = {f":{test.lineno}: " for g in generators for test in g.ifs}
        return any(d.kind == "data" and any(line in d.key for line in lines) for d in self.world.decisions) if lines else False

    def _generate(self, generators: list[ast.comprehension], collect: Callable[[], None]) -> None:
        if not generators:
            collect()
            return
        first, rest = generators[0], generators[1:]

        def turn(item: Value) -> None:
            self.bind(first.target, item)
            inside, self.loops = self.loops, self.loops[:-1]
            try:
                chosen = all(self.truth(self._asked(test, first, even), test) for test in first.ifs)
            finally:
                self.loops = inside
            if chosen:
                self._generate(rest, collect)

        items = self.items(settled(self.eval(first.iter)), first.iter)
        even = "even" in items.tags | tags_of(items.loader)
        self.turns(items, first.iter, turn)

    def _asked(self, test: ast.expr, generator: ast.comprehension, even: bool) -> Value:
        value = self.eval(test)
        if tags_of(value) >= {"rank", "modulo"} and not even:
            self.memo["dealt", id(generator)] = True
        return value

    def dealt(self, values: list[Value], node: ast.AST) -> Value:
        """Every so manyth item, as the rank says: some ranks may have one more."""
        if all(isinstance(value, int) for value in values):
            made = Items(values)
            made.tags = frozenset({"rank", "uneven"})
            return made
        if any(isinstance(value, Thing) for value in values):
            return values
        return self.shard(frozenset(), node)

    def turns(self, items: Items, at: ast.AST, body: Callable[[Value], None]) -> None:
        """Run `body` once an item, with the turn noted and epochs announced."""
        raise NotImplementedError

    def bind(self, target: ast.expr, value: Value) -> None:
        """Give a value to a name, attribute, item or pattern."""
        raise NotImplementedError


def generator_of(state: State, values: list[Value]) -> Value:
    """What a generator over these values is: of parameters it can be used once."""
    params = [v for v in values if isinstance(v, Thing) and v.kind == "param"]
    if not params or len(params) < len(values):
        return values
    made = state.make("params", None)
    made.owners, made.facts["generator"] = {owner for p in params for owner in p.owners}, True
    made.facts["asked"] = any(p.facts.get("asked") for p in params)
    return made
