"""Definitions and imports of the imagined run: functions with their decorators, classes, modules of the project."""

from __future__ import annotations

import ast

from halfstep.imagine.assignments import Assignments
from halfstep.imagine.naming import MAIN
from halfstep.imagine.state import MICRO_BATCHES, Exited, Raised, Restart
from halfstep.imagine.values import (
    Bound,
    Class,
    External,
    Function,
    Scope,
    Thing,
    Unknown,
    Value,
    settled,
    tags_of,
)


class Definitions(Assignments):
    """Makes functions and classes, and runs the modules that are imported."""

    def claim(self, node: ast.Assert) -> None:
        """`assert`: what it says of the length of a loader holds from the start; where it says that there is CUDA, there is."""
        value = settled(self.eval(node.test))
        tags = tags_of(value) & {"loader", "modulo", "accum"}
        if self.unwrap_truth(value) is False and tags and self.micro_batches == MICRO_BATCHES:
            raise Restart(2 * (self.largest_window or 4))
        if "cuda" in ast.unparse(node.test) and not self.truth(value, node.test):
            raise Raised

    def define_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """`def`; what sets a property stands beside it, under a name of its own."""
        of_property = [
            f".{d.attr}" for d in node.decorator_list if isinstance(d, ast.Attribute) and d.attr in ("setter", "deleter")
        ]
        self.scope.names["".join([node.name, *of_property])] = self.function_of(node)

    def function_of(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Value:
        """The function that a `def` makes, with its decorators."""
        args = node.args
        scope = self.scope.outer if self.scope.is_class and self.scope.outer is not None else self.scope
        function = Function(
            node,
            scope,
            self.module,
            node.name,
            defaults=[self.eval(d) for d in args.defaults],
            kw_defaults=[self.eval(d) if d is not None else None for d in args.kw_defaults],
            owner=self.scope.owner,
            generator=self.project.is_generator(node),
        )
        names: set[str] = set()
        wrappers: list[Value] = []
        replacing: list[Value] = []
        for decorator in node.decorator_list:
            value = self.eval(decorator)
            last = decorator_name(decorator)
            names.add(last)
            first_only = MAIN.search(last) and isinstance(value, (External, Unknown))
            if (
                first_only
                or isinstance(settled(value), Thing)
                or last in ("no_grad", "inference_mode", "enable_grad", "autocast")
            ):
                wrappers.append(value)
            elif isinstance(value, Function) or (isinstance(value, Bound) and value.target is not None):
                replacing.append(value)
        function.decorators = frozenset(names)
        function.wrapped_by = tuple(wrappers)
        return self._decorated(function, replacing, node)

    def _decorated(self, function: Function, decorators: list[Value], node: ast.AST) -> Function:
        """What decorators of the program make of a function, if that is a function again."""
        for decorator in reversed(decorators):
            made = settled(self.call(decorator, [function], {}, node))
            if isinstance(made, Function) and made is not function:
                made.decorators |= function.decorators
                made.inner = function
                function = made
        return function

    def define_class(self, node: ast.ClassDef) -> None:
        """`class`."""
        bases = [self.eval(base) for base in node.bases]
        scope = Scope({}, self.scope, self.module, is_class=True)
        decorators = frozenset(decorator_name(d) for d in node.decorator_list)
        made = scope.owner = Class(node, scope, self.module, node.name, bases, decorators)
        outer, self.scope = self.scope, scope
        try:
            self.run(node.body)
        finally:
            self.scope = outer
        self.scope.names[node.name] = made

    def import_names(self, node: ast.Import) -> None:
        """`import a.b as c`."""
        for alias in node.names:
            target = self.project.find(alias.name, self.module.path)
            if target is not None:
                self.scope.names[alias.asname or alias.name.split(".")[0]] = self.load(target)
            elif alias.asname:
                self.scope.names[alias.asname] = External(alias.name)
            else:
                root = alias.name.split(".")[0]
                self.scope.names[root] = External(root)

    def import_from(self, node: ast.ImportFrom) -> None:
        """`from a import b`, from the project where it has it."""
        dotted = "." * node.level + (node.module or "")
        target = self.project.find(dotted, self.module.path)
        module = self.load(target) if target is not None else None
        for alias in node.names:
            name = alias.asname or alias.name
            if alias.name == "*":
                if module is not None:
                    self.scope.names.update(module.scope.names)
                continue
            inner = self.project.find(f"{dotted}.{alias.name}" if node.module else f"{dotted}{alias.name}", self.module.path)
            if module is not None and alias.name in module.scope.names:
                self.scope.names[name] = module.scope.names[alias.name]
            elif inner is not None:
                self.scope.names[name] = self.load(inner)
            elif target is None:
                self.scope.names[name] = External(f"{node.module or ''}.{alias.name}".lstrip("."))
            else:
                self.scope.names[name] = Unknown(alias.name)

    def load(self, module: Value) -> Value:
        """Run a module of the project once."""
        if not module.done:
            module.done = True
            saved = self.scope, self.module, self.stack
            module.scope = Scope({"__name__": module.name}, None, module)
            self.scope, self.module, self.stack = module.scope, module, []
            try:
                self.run(module.tree.body)
            except Raised as raised:
                if module.name == "__main__" and not isinstance(raised, Exited):
                    raise
            finally:
                self.scope, self.module, self.stack = saved
        return module


def decorator_name(node: ast.expr) -> str:
    """The last name of a decorator."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
