"""Statements of the imagined run."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable

from halfstep.events.vocabulary import EpochBegin, EpochEnd, Fetch, LoopLeft, Turn
from halfstep.imagine.attempts import Attempts
from halfstep.imagine.cursors import Cursor
from halfstep.imagine.state import MICRO_BATCHES, BreakLoop, ContinueLoop, ReturnValue
from halfstep.imagine.values import (
    NO_TAGS,
    External,
    Instance,
    Items,
    Scope,
    Stream,
    Tensor,
    Thing,
    Unknown,
    Value,
    settled,
    tags_of,
)

_RAISES = re.compile(r"(^|\.)(assertRaises(Regex)?|raises)\(")
"""Asks that what is inside fails, which is meant then."""


class Statements(Attempts):
    """Runs statements."""

    def run(self, body: list[ast.stmt]) -> None:
        """Run statements in order."""
        for statement in body:
            self.spend()
            handler = STATEMENTS.get(type(statement))
            if handler is not None:
                handler(self, statement)

    # --- control flow ---

    def branch(self, node: ast.If) -> None:
        """`if`, with the answer of this world."""
        value = self.eval(node.test)
        if (
            isinstance(value, Unknown)
            and isinstance(node.test, ast.Compare)
            and isinstance(node.body[-1], (ast.Break, ast.Return, ast.Raise))
        ):
            value.default = False
        taken = self.truth(value, node.test)
        with self.guarded(tags_of(value)):
            self.run(node.body if taken else node.orelse)

    def loop_for(self, node: ast.For | ast.AsyncFor) -> None:
        """`for`."""
        source = settled(self.eval(node.iter))
        if isinstance(source, Stream):
            self.loop_stream(node, source)
        else:
            items = self.items(source, node.iter, node.body)
            turns = self.loop_items(node, items, node)
            if isinstance(source, Cursor):
                source.at -= len(items) - turns

    def loop_items(self, node: ast.For | ast.AsyncFor, items: Items, at: ast.AST) -> int:
        """A loop over known items; how many of them it took."""
        taken = 0

        def turn(item: Value) -> None:
            nonlocal taken
            taken += 1
            self._turn(node, item)

        try:
            self.turns(items, at, turn)
        except BreakLoop:
            return taken
        self.run(node.orelse)
        return len(items)

    def _turn(self, node: ast.For | ast.AsyncFor, item: Value) -> None:
        self.bind(node.target, item)
        with contextlib.suppress(ContinueLoop):
            self.run(node.body)

    def begin(self, loader: Thing, at: ast.AST) -> int:
        """A pass over a loader begins; its number."""
        epoch = self.number(f"epoch {loader.number}") - 1
        function, called = self.calls[-1] if self.calls else "", self._passed(getattr(at, "iter", at))
        length = loader.facts.get("length")
        self.emit(EpochBegin, at, loader=loader, index=epoch, function=function, called=called, length=length)
        return epoch

    def turns(self, items: Items, at: ast.AST, body: Callable[[Value], None]) -> None:
        """Run `body` once an item, with the turn noted and epochs announced."""
        loop, place = self.number("loop"), self.place(at)
        loader = items.loader
        for other in items.beside:
            self.emit(EpochEnd, at, loader=other, index=self.begin(other, at))
        epoch = self.begin(loader, at) if loader is not None else 0
        self.loops.append(Turn(loop, 0, place, items.over, items.tags))
        before = self.budget.steps
        try:
            for index, item in enumerate(list(items)):
                if loader is None and index < len(items) - 1 and self.is_long(before - self.budget.steps, index):
                    continue
                self.turns_here = len(items)
                self.loops[-1] = Turn(loop, index, place, items.over, items.tags)
                if loader is not None:
                    self.emit(Fetch, at, loader=loader, micro_batch=index)
                body(item)
        finally:
            self.loops.pop()
        if loader is not None:
            self.emit(EpochEnd, at, loader=loader, index=epoch)

    def _passed(self, looped: ast.AST) -> str:
        """What is looped over, and what the caller calls it where it is a parameter."""
        text, call = _text(looped), self.scope.names.get("\0call")
        if not isinstance(call, tuple) or not isinstance(looped, ast.Name):
            return text
        function, node = call
        names = [a.arg for a in function.node.args.args]
        given = dict(zip(names[names[:1] == ["self"] :], node.args, strict=False))
        given.update({k.arg: k.value for k in node.keywords if k.arg})
        return f"{text} {_text(given[looped.id])}" if looped.id in given else text

    def loop_stream(self, node: ast.For | ast.AsyncFor, stream: Stream) -> None:
        """A loop over a generator of the program: its body runs at each `yield`."""
        loop, place = self.number("loop"), self.place(node)
        count = 0

        def turn(value: Value) -> Value:
            nonlocal count
            count += 1
            outer = self.loops
            self.loops = [*self.loops, Turn(loop, count - 1, place, "items")]
            try:
                self._turn(node, value)
            finally:
                self.loops = outer
            if count >= 2 * MICRO_BATCHES:
                raise BreakLoop
            return None

        try:
            self.resume(stream, turn, node.iter)
        except BreakLoop:
            return

    def delegate(self, source: Value, receive: Callable[[Value], Value], node: ast.YieldFrom) -> None:
        """`yield from source`: whoever runs the generator gets what another one yields, or the items of something."""
        if isinstance(source, Stream):
            self.resume(source, receive, node)
        else:
            self.turns(self.items(source, node), node, lambda item: (receive(item), None)[1])

    def loop_while(self, node: ast.While) -> None:
        """`while`, within a bound."""
        loop, place = self.number("loop"), self.place(node)
        self.loops.append(Turn(loop, 0, place, "while"))
        try:
            counted, tags = None, NO_TAGS
            for index in range(2 * MICRO_BATCHES):
                self.loops[-1] = Turn(loop, index, place, "while", tags)
                test = self.eval(node.test)
                before, counted = counted, self._counter(node.test)
                if index and counted is not None:
                    tags = frozenset({"part" if counted == before else "epochs"})
                if not isinstance(settled(test), (Unknown, Tensor)) and not self.truth(test, node.test):
                    if "data" in tags_of(test):
                        self.emit(LoopLeft, node.test)
                    break
                try:
                    self.run(node.body)
                except ContinueLoop:
                    continue
        except BreakLoop:
            pass
        finally:
            self.loops.pop()

    def _counter(self, test: ast.expr) -> Value:
        """The number of epochs that a `while` counts, if that is what it counts."""
        if not isinstance(test, ast.Compare) or "epochs" not in tags_of(settled(self.eval(test.comparators[-1]))):
            return None
        counted = settled(self.eval(test.left))
        return counted if isinstance(counted, int) else None

    def with_block(self, node: ast.With | ast.AsyncWith) -> None:
        """`with`."""
        self._enter(node.items, node.body)

    def _enter(self, items: list[ast.withitem], body: list[ast.stmt]) -> None:
        if not items:
            self.run(body)
            return
        first, rest = items[0], items[1:]
        if _RAISES.search(ast.unparse(first.context_expr)):
            return
        context = self.eval(first.context_expr)

        def inside(value: Value) -> None:
            if first.optional_vars is not None:
                self.bind(first.optional_vars, value)
            self._enter(rest, body)

        self.within(context, inside, first.context_expr)

    def within(self, context: Value, inside: Callable[[Value], None], node: ast.AST) -> None:
        """Run `inside` with a context open."""
        raise NotImplementedError

    def give_back(self, node: ast.Return) -> None:
        """`return`."""
        value = self.eval(node.value) if node.value is not None else None
        if len(self.loops) > self.entries[-1]:
            self.emit(LoopLeft, node)
        raise ReturnValue(value)

    def remove(self, node: ast.Delete) -> None:
        """`del`."""
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.scope.names.pop(target.id, None)
            elif isinstance(target, ast.Subscript):
                self.remove_item(settled(self.eval(target.value)), target.slice)
            elif isinstance(target, ast.Attribute) and isinstance(owner := settled(self.eval(target.value)), Instance):
                owner.attrs.pop(target.attr, None)

    def remove_item(self, held: Value, at: ast.expr) -> None:
        """`del held[at]`; a list that is emptied keeps nothing alive."""
        if isinstance(held, list) and isinstance(at, ast.Slice):
            bounds = [settled(self.eval(part)) if part is not None else None for part in (at.lower, at.upper, at.step)]
            if all(bound is None or isinstance(bound, int) for bound in bounds) and bounds[2] != 0:
                del held[slice(*bounds)]
                self.memo.pop(("container", id(held)), None)
        elif isinstance(held, (list, dict)):
            key = self.unwrap_truth(settled(self.eval(at)))
            with contextlib.suppress(TypeError, LookupError):
                del held[key]

    def declare(self, node: ast.Global | ast.Nonlocal) -> None:
        """`global` and `nonlocal`."""
        declared = self.scope.names.setdefault("\0global", {})
        for name in node.names:
            scope: Scope | None = self.module.scope
            if isinstance(node, ast.Nonlocal):
                scope = self.scope.outer
                while scope is not None and name not in scope.names:
                    scope = scope.outer
            declared[name] = scope or self.module.scope

    def choose_case(self, node: ast.Match) -> None:
        """`match`."""
        subject = settled(self.eval(node.subject))
        for case in node.cases:
            fits = self.fits(case.pattern, subject, node.subject)
            if fits and (case.guard is None or self.truth(self.eval(case.guard), case.guard)):
                with self.guarded(tags_of(subject) & {"rank"}):
                    self.run(case.body)
                return

    def fits(self, pattern: ast.pattern, subject: Value, node: ast.expr) -> bool:
        """Whether a value has the form of a pattern, whose names it then gives their values."""
        subject = settled(subject)
        if isinstance(pattern, ast.MatchAs):
            fits = pattern.pattern is None or self.fits(pattern.pattern, subject, node)
            if fits and pattern.name is not None:
                self.bind_name(pattern.name, subject)
            return fits
        if isinstance(pattern, ast.MatchOr):
            return any(self.fits(each, subject, node) for each in pattern.patterns)
        if isinstance(pattern, ast.MatchValue):
            known = settled(self.eval(pattern.value))
            asked = ast.copy_location(ast.Compare(node, [ast.Eq()], [pattern.value]), pattern)
            return self.truth(self.compare_pair(subject, ast.Eq(), known, asked), pattern)
        if isinstance(pattern, ast.MatchSingleton):
            return subject is pattern.value
        if isinstance(pattern, ast.MatchClass):
            return self._is_of(pattern, subject, node)
        if isinstance(pattern, ast.MatchSequence):
            return self._has_parts(pattern, subject, node)
        if isinstance(pattern, ast.MatchMapping) and isinstance(subject, dict):
            keys = [settled(self.eval(key)) for key in pattern.keys]
            return all(k in subject and self.fits(p, subject[k], node) for k, p in zip(keys, pattern.patterns, strict=True))
        return not isinstance(subject, Tensor)

    def _is_of(self, pattern: ast.MatchClass, subject: Value, node: ast.expr) -> bool:
        answer = self.call(External("builtins.isinstance"), [subject, self.eval(pattern.cls)], {}, pattern)
        if not self.truth(answer, pattern):
            return False
        inner = pattern.patterns
        return all(self.fits(p, subject if len(inner) == 1 else Unknown("?"), node) for p in inner) and all(
            self.fits(p, self.getattr(subject, name, pattern), node)
            for name, p in zip(pattern.kwd_attrs, pattern.kwd_patterns, strict=True)
        )

    def _has_parts(self, pattern: ast.MatchSequence, subject: Value, node: ast.expr) -> bool:
        inner = pattern.patterns
        if any(isinstance(p, ast.MatchStar) for p in inner) or not isinstance(subject, (list, tuple)):
            whole = isinstance(subject, (list, tuple, Unknown)) or (isinstance(subject, Tensor) and bool(subject.loaders))
            return whole and all(
                isinstance(p, ast.MatchStar) or self.fits(p, self.part(subject, i), node) for i, p in enumerate(inner)
            )
        return len(subject) == len(inner) and all(self.fits(p, v, node) for p, v in zip(inner, subject, strict=True))

    def evaluate(self, node: ast.Expr) -> None:
        """An expression as a statement; `set_grad_enabled` holds from then on."""
        value = settled(self.eval(node.value))
        if isinstance(value, Thing) and value.kind == "context" and value.facts.get("sets"):
            self.grad[-1] = value.facts["what"] == "enable_grad"

    def stop_loop(self, node: ast.Break) -> None:
        """`break`."""
        self.emit(LoopLeft, node)
        raise BreakLoop

    def next_turn(self, node: ast.Continue) -> None:
        """`continue`; what a helper said of the data is acted on here."""
        key, turn, depth = self.memo.get("fired", ("", [], 0))
        if turn == self.loops[-1:] and depth > len(self.stack):
            self.world.move(key, self.place(node))
        raise ContinueLoop


def _text(node: ast.AST) -> str:
    return ast.unparse(node)[:60] if isinstance(node, ast.expr) else ""


STATEMENTS: dict[type[ast.stmt], Callable[..., None]] = {
    ast.FunctionDef: Statements.define_function,
    ast.AsyncFunctionDef: Statements.define_function,
    ast.ClassDef: Statements.define_class,
    ast.Import: Statements.import_names,
    ast.ImportFrom: Statements.import_from,
    ast.Assign: Statements.assign,
    ast.AnnAssign: Statements.annotated,
    ast.AugAssign: Statements.augmented,
    ast.If: Statements.branch,
    ast.For: Statements.loop_for,
    ast.AsyncFor: Statements.loop_for,
    ast.While: Statements.loop_while,
    ast.With: Statements.with_block,
    ast.AsyncWith: Statements.with_block,
    ast.Try: Statements.attempt,
    ast.Return: Statements.give_back,
    ast.Raise: Statements.throw,
    ast.Assert: Statements.claim,
    ast.Delete: Statements.remove,
    ast.Global: Statements.declare,
    ast.Nonlocal: Statements.declare,
    ast.Match: Statements.choose_case,
    ast.Expr: Statements.evaluate,
    ast.Break: Statements.stop_loop,
    ast.Continue: Statements.next_turn,
}
"""Handlers by kind of statement."""
if hasattr(ast, "TryStar"):
    STATEMENTS[ast.TryStar] = Statements.attempt
