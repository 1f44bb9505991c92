"""Calls and attributes: functions, methods and classes of the program, and the way into the library."""

from __future__ import annotations

import ast
from collections.abc import Callable

from halfstep.events.vocabulary import AutocastEnter, AutocastExit, NoSyncEnter, NoSyncExit
from halfstep.imagine.cursors import collected
from halfstep.imagine.forwards import Forwards
from halfstep.imagine.library import attributes, externals, formats, methods, own_optimizers
from halfstep.imagine.naming import as_flag, hinted
from halfstep.imagine.state import MAX_DEPTH, BreakLoop, ContinueLoop, ReturnValue, Signal
from halfstep.imagine.values import (
    NO_TAGS,
    Bound,
    Class,
    External,
    Function,
    Instance,
    Module,
    Partial,
    Scope,
    Stream,
    Tensor,
    Thing,
    Unknown,
    Value,
    derive,
    settled,
    tags_of,
)

OPTIMIZER_BASES = ("Optimizer", "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam", "LBFGS")
MODULE_BASES = ("Module", "LightningModule", "PreTrainedModel", "ModelMixin", "Sequential")


class Calls(Forwards):
    """Calls values and reads attributes."""

    def call(self, func: Value, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
        """Call a value."""
        func = settled(func)
        if isinstance(func, Function):
            return self.call_function(func, args, kwargs, node)
        if isinstance(func, Bound):
            return self.call_bound(func, args, kwargs, node)
        if isinstance(func, Class):
            return self.instantiate(func, args, kwargs, node)
        if isinstance(func, External):
            return externals.call(self, func, args, kwargs, node)
        if isinstance(func, Instance):
            return self.call_instance(func, args, kwargs, node)
        if isinstance(func, Thing):
            return methods.call_thing(self, func, args, kwargs, node)
        if isinstance(func, Partial):
            return self.call(func.func, [*func.args, *args], {**func.kwargs, **kwargs}, node)
        if isinstance(func, Unknown):
            return externals.call_unknown(self, func, args, kwargs, node)
        if isinstance(func, Tensor):
            return derive(func)
        return externals.blend(self, "?()", [*args, *kwargs.values()], node)

    # --- functions of the program ---

    def call_function(
        self, func: Function, args: list[Value], kwargs: dict[str, Value], node: ast.AST, self_value: Value = None
    ) -> Value:
        """Call a function of the program; generators and context managers are only prepared."""
        self.entered.add(id(func.node))
        if len(self.calls) > MAX_DEPTH or self.calls.count(func.name) > 4:
            return Unknown(f"{func.name}()")
        scope = Scope({}, func.scope, func.module)
        self.bind_arguments(func, scope, args, kwargs)
        if isinstance(node, ast.Call):
            scope.names["\0call"] = (func, node)
        if "\0class" not in scope.names and func.owner is not None:
            scope.names["\0class"] = func.owner
            scope.names["\0self"] = args[0] if args else None
        if func.generator:
            return Stream(func, scope)
        return self.in_frame(func, scope, node, lambda: self.body_of(func))

    def body_of(self, func: Function) -> Value:
        """Run the body in the current frame."""
        if isinstance(func.node, ast.Lambda):
            return self.eval(func.node.body)
        try:
            self.run(func.node.body)
        except ReturnValue as returned:
            return returned.value
        return None

    def in_frame(self, func: Function, scope: Scope, node: ast.AST, body: Callable[[], Value]) -> Value:
        """Run `body` in a new frame, with the contexts of the function's decorators open."""
        saved = self.scope, self.module
        self.stack.append(self.place(node))
        self.calls.append(func.name)
        self.entries.append(len(self.loops))
        self.yields.append(None)
        self.scope, self.module = scope, func.module
        result: Value = None

        def inside(_: Value) -> None:
            nonlocal result
            result = body()

        try:
            self._within_all(list(func.wrapped_by), inside, func.node)
        finally:
            self.scope, self.module = saved
            self.yields.pop()
            self.entries.pop()
            self.calls.pop()
            self.stack.pop()
        return result

    def _within_all(self, contexts: list[Value], inside: Callable[[Value], None], node: ast.AST) -> None:
        if not contexts:
            inside(None)
            return
        first = settled(contexts[0])
        if isinstance(first, External):
            first = settled(self.call(first, [], {}, node))
        if isinstance(first, Unknown) and "main" in first.tags and not self.truth(first, node):
            return
        if not isinstance(first, Thing):
            self._within_all(contexts[1:], inside, node)
            return
        self.within(first, lambda _: self._within_all(contexts[1:], inside, node), node)

    def bind_arguments(self, func: Function, scope: Scope, args: list[Value], kwargs: dict[str, Value]) -> None:
        """Give the parameters their values."""
        spec = func.node.args
        names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        left = dict(kwargs)
        for name, value in zip(names, args, strict=False):
            scope.names[name] = hinted(name, value)
        if spec.vararg is not None:
            scope.names[spec.vararg.arg] = tuple(args[len(names) :])
        first_default = len(names) - len(func.defaults)
        for index, name in enumerate(names):
            if name in scope.names:
                left.pop(name, None)
            elif name in left:
                scope.names[name] = hinted(name, left.pop(name))
            elif index >= first_default:
                scope.names[name] = hinted(name, as_flag(name, func.defaults[index - first_default]))
            else:
                scope.names[name] = hinted(
                    name, left.get("**", Unknown(name)) if not isinstance(left.get("**"), Unknown) else Unknown(name)
                )
        for arg, default in zip(spec.kwonlyargs, func.kw_defaults, strict=False):
            scope.names[arg.arg] = hinted(arg.arg, left.pop(arg.arg, default))
        if spec.kwarg is not None:
            left.pop("**", None)
            scope.names[spec.kwarg.arg] = left

    def resume(self, stream: Stream, receive: Callable[[Value], Value], node: ast.AST | None = None) -> None:
        """Run a generator for a node, handing what it yields to `receive`."""
        func = stream.function

        def body() -> Value:
            self.yields[-1] = receive_in_caller
            return self.body_of(func)

        saved = self.scope, self.module
        depth = len(self.stack), len(self.calls)

        def receive_in_caller(value: Value) -> Value:
            inner = self.scope, self.module, self.stack, self.calls
            self.scope, self.module = saved
            self.stack, self.calls = self.stack[: depth[0]], self.calls[: depth[1]]
            try:
                return receive(value)
            finally:
                self.scope, self.module, self.stack, self.calls = inner

        self.in_frame(func, stream.scope, node or func.node, body)

    def first_of(self, stream: Stream) -> Value:
        """The next value that a generator yields."""
        got = collected(self, stream).take(1)
        return got[0] if got else None

    # --- objects of the program ---

    def instantiate(self, cls: Class, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
        """Make an object of a class of the program."""
        made = Instance(cls)
        if cls.is_a(*MODULE_BASES):
            made.thing = self.make("model", node, tags=NO_TAGS)
            made.thing.facts["instance"] = made
        elif cls.is_a("IterableDataset"):
            made.thing = self.make("dataset", node, iterable=True, tags=tags_of([*args, *kwargs.values()]))
        elif cls.is_a("Dataset"):
            made.thing = self.make("dataset", node, iterable=False, tags=tags_of([*args, *kwargs.values()]))
        elif cls.is_a(*OPTIMIZER_BASES):
            made.thing = own_optimizers.make(self, cls, [*args, *kwargs.values()], node)
        if made.thing is not None:
            made.thing.facts["instance"] = made
        if "dataclass" in cls.decorators or cls.is_a("NamedTuple"):
            self._fill_fields(cls, made, args, kwargs)
        init = cls.lookup("__init__")
        if isinstance(init, Function):
            self.call_function(init, [made, *args], kwargs, node)
        if made.thing is not None and made.thing.kind == "model":
            given = any(formats.dtype_name(value) in formats.LIMITS for value in [*args, *kwargs.values()])
            formats.take_dtype(made.thing, self.place(node) if given else None)
        post = cls.lookup("__post_init__")
        if isinstance(post, Function):
            self.call_function(post, [made], {}, node)
        if made.thing is not None and made.thing.kind == "optimizer":
            own_optimizers.settle(self, made, made.thing)
        return made

    def _fill_fields(self, cls: Class, made: Instance, args: list[Value], kwargs: dict[str, Value]) -> None:
        fields = [s.target.id for s in cls.node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
        for name, value in [*zip(fields, args, strict=False), *kwargs.items()]:
            made.attrs[name] = hinted(name, value)
        for name in fields:
            if name not in made.attrs and name in cls.scope.names:
                value = cls.scope.names[name]
                if isinstance(value, Partial):
                    value = self.call(value, [], {}, cls.node)
                flag = isinstance(value, (bool, str)) or value is None
                made.attrs[name] = (
                    Unknown(f"{name}", default=value, has_default=True) if flag and not isinstance(value, str) else value
                )

    def call_instance(self, value: Instance, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
        """Call an object of the program: a module's forward pass, or its `__call__`."""
        method = value.cls.lookup("__call__")
        if isinstance(method, Function):
            return self.call_function(method, [value, *args], kwargs, node)
        if value.thing is not None and value.thing.kind == "model":
            return self.forward(value.thing, args, kwargs, node)
        return externals.blend(self, f"{value.cls.name}()", [*args, *kwargs.values()], node)

    # --- methods and attributes ---

    def call_bound(self, bound: Bound, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
        """Call a method."""
        if bound.target is not None:
            return self.call_method(bound, args, kwargs, node)
        return methods.call(self, bound.self_value, bound.name, args, kwargs, node)

    def call_method(self, bound: Bound, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
        """Call a method of the program's own class."""
        func = bound.target
        assert func is not None
        if "staticmethod" in func.decorators:
            return self.call_function(func, args, kwargs, node)
        thing = bound.self_value.thing if isinstance(bound.self_value, Instance) else None
        if bound.name == "step" and thing is not None and thing.kind == "optimizer":
            return own_optimizers.step(self, thing, bound, args, kwargs, node)
        return self.call_function(func, [bound.self_value, *args], kwargs, node)

    def getattr(self, value: Value, name: str, node: ast.AST) -> Value:
        """An attribute of a value."""
        value = settled(value)
        if isinstance(value, Instance):
            return self.instance_attribute(value, name, node)
        if isinstance(value, Module):
            return value.scope.names.get(name, Unknown(f"{value.name}.{name}"))
        if isinstance(value, Class):
            found = value.lookup(name)
            if isinstance(found, Function) and "classmethod" in found.decorators:
                return Bound(value, name, found)
            return found if found is not None else External(f"{value.name}.{name}")
        return attributes.read(self, value, name, node)

    def instance_attribute(self, value: Instance, name: str, node: ast.AST) -> Value:
        """An attribute of an object of the program."""
        value.read.add(name)
        if name in value.attrs:
            return value.attrs[name]
        found = value.cls.lookup(name)
        if isinstance(found, Function):
            if found.decorators & {"property", "cached_property"}:
                return self.call_function(found, [value], {}, node)
            receiver = value.cls if "classmethod" in found.decorators else value
            return Bound(receiver, name, found)
        if found is not None:
            if found is None or isinstance(found, bool):
                return found
            return hinted(name, found)
        if name == "__class__":
            return value.cls
        if name == "_asdict":
            return Partial(External("dataclasses.asdict"), [value], {})
        if name == "__dict__":
            return value.attrs
        if attributes.is_framework_method(value.cls, name):
            return Bound(value, name)
        if value.thing is not None:
            return attributes.read(self, value.thing, name, node)
        return value.attrs.setdefault(name, hinted(name, Unknown(f"self.{name}")))

    def item_of_thing(self, thing: Thing, key: Value, node: ast.AST) -> Value:
        """An item of a library object."""
        return attributes.item(self, thing, key, node)

    def set_on_thing(self, thing: Thing, name: str, new: Value, node: ast.AST) -> None:
        """An attribute of a library object that means something is set."""
        attributes.write(self, thing, name, new, node)

    # --- contexts ---

    def within(self, context: Value, inside: Callable[[Value], None], node: ast.AST) -> None:
        """Run `inside` with a context open."""
        context = settled(context)
        if isinstance(context, Stream):
            self._within_stream(context, inside, node)
        elif isinstance(context, Instance):
            self._within_instance(context, inside, node)
        elif isinstance(context, Thing) and context.kind == "context":
            self._within_thing(context, inside, node)
        elif isinstance(context, Thing) and context.kind == "stack":
            inside(context)
            for region in context.facts.pop("open", []):
                region()
        else:
            inside(context)

    def _within_stream(self, context: Stream, inside: Callable[[Value], None], node: ast.AST) -> None:
        """A context made of a generator, which goes on after its `yield` whichever way its block was left."""
        left: list[Signal] = []

        def block(value: Value) -> None:
            try:
                inside(value)
            except (ReturnValue, BreakLoop, ContinueLoop) as signal:
                left.append(signal)

        self.resume(context, block, node)
        for signal in left:
            raise signal

    def _within_instance(self, context: Instance, inside: Callable[[Value], None], node: ast.AST) -> None:
        enter, leave = context.cls.lookup("__enter__"), context.cls.lookup("__exit__")
        value: Value = context
        if isinstance(enter, Function):
            value = self.call_function(enter, [context], {}, node)
        try:
            inside(value)
        finally:
            if isinstance(leave, Function):
                self.call_function(leave, [context, None, None, None], {}, node)

    def _within_thing(self, context: Thing, inside: Callable[[Value], None], node: ast.AST) -> None:
        leave = self.open_context(context, node)
        try:
            inside(context.facts.get("value", context))
        finally:
            leave()

    def open_context(self, context: Thing, node: ast.AST) -> Callable[[], None]:
        """Open a library context; the result closes it."""
        what = context.facts.get("what")
        if what == "autocast":
            return self._open_autocast(context, node)
        if what in ("no_grad", "enable_grad"):
            self.grad.append(what == "enable_grad")
            return self._close_grad
        if what == "no_sync":
            model = context.facts.get("model")
            self.no_sync.append(model)
            self.emit(NoSyncEnter, node, model=model)

            def leave() -> None:
                self.no_sync.pop()
                self.emit(NoSyncExit, node, model=model)

            return leave
        if what == "accumulate":
            return attributes.open_accumulation(self, context, node)
        return lambda: None

    def _close_grad(self) -> None:
        self.grad.pop()

    def _open_autocast(self, context: Thing, node: ast.AST) -> Callable[[], None]:
        region = context.facts["region"]()
        self.regions.append(region)
        if region.enabled:
            self.emit(AutocastEnter, node, region=region)

        def leave() -> None:
            self.regions.pop()
            if region.enabled:
                self.emit(AutocastExit, node, region=region)

        return leave
