"""Assignments of the imagined run: names, attributes, items, patterns, and what they mean for optimizers and data."""

from __future__ import annotations

import ast
import contextlib

from halfstep.events.vocabulary import Made, ModuleReplaced, Retain, SetEpoch
from halfstep.imagine.naming import hinted
from halfstep.imagine.project import attributes_read
from halfstep.imagine.state import State
from halfstep.imagine.values import (
    Bound,
    Class,
    External,
    Instance,
    Scope,
    Stream,
    Tensor,
    Thing,
    Unknown,
    Value,
    counted,
    derive,
    model_of,
    settled,
    tags_of,
)


class Assignments(State):
    """Gives values to targets."""

    # --- assignment ---

    def assign(self, node: ast.Assign) -> None:
        """`a = b = value`."""
        value = self.eval(node.value)
        if isinstance(value, Tensor) and self.loops and _adds_to(node.targets[0], node.value):
            value = self.kept(None, value, ast.unparse(node.targets[0]), node)
        for target in node.targets:
            self.bind(target, value)

    def annotated(self, node: ast.AnnAssign) -> None:
        """`name: type = value`."""
        if node.value is not None:
            self.bind(node.target, self.eval(node.value))
        elif self.scope.is_class and isinstance(node.target, ast.Name):
            self.scope.names[node.target.id] = hinted(node.target.id, Unknown(node.target.id))

    def augmented(self, node: ast.AugAssign) -> None:
        """`target op= value`."""
        target = node.target
        read: ast.expr = ast.copy_location(
            ast.Name(target.id, ast.Load()) if isinstance(target, ast.Name) else _loaded(target), target
        )
        before = settled(self.eval(read))
        if type(before) is list and isinstance(node.op, ast.Add):
            self.call(Bound(before, "extend"), [self.eval(node.value)], {}, node)
            return
        after = self.eval(ast.copy_location(ast.BinOp(read, node.op, node.value), node))
        if isinstance(node.op, ast.Add) and not self._is_foreign(target):
            after = self.kept(before, after, ast.unparse(target), node)
            if isinstance(after, Unknown):
                after.tags |= {"total"}
        self.bind(target, after)

    def _is_foreign(self, target: ast.expr) -> bool:
        """Whether this is an attribute of what was handed to a start, outside of loops: the caller may set it anew."""
        at_start = len(self.loops) == self.entries[:2][-1]
        return at_start and isinstance(target, ast.Attribute) and isinstance(settled(self.eval(target.value)), Unknown)

    def kept(self, before: Value, after: Value, name: str, node: ast.AST) -> Value:
        """An accumulator that now holds a graph: note it, so that it can be told from a sum that is backpropagated."""
        if not isinstance(after, Tensor) or not after.grad or not self.grad_enabled or "guess" in after.tags:
            return after
        inherited = (before if isinstance(before, Tensor) else after).retained
        number = next(iter(inherited), 0) or self.number("container")
        self.emit(Retain, node, container=number, name=name)
        return derive(after, retained=after.retained | {number})

    def bind(self, target: ast.expr, value: Value) -> None:
        """Give a value to a name, attribute, item or pattern."""
        if isinstance(target, ast.Name):
            self.bind_name(target.id, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            self.unpack(target.elts, value)
        elif isinstance(target, ast.Attribute):
            self.setattr(self.eval(target.value), target.attr, value, target)
        elif isinstance(target, ast.Subscript):
            held = self.eval(target.value)
            if isinstance(held, list) and isinstance(value, list) and ast.unparse(target.slice) == ":":
                held[:] = value
                self.memo.pop(("container", id(held)), None)
            else:
                self.setitem(held, self.eval(target.slice), value, target)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, value)

    def bind_name(self, name: str, value: Value) -> None:
        """Give a value to a name; its name may say what it counts."""
        value = counted(hinted(name, value), self.guard)
        self._name(value, name)
        scope: Scope | None = self.scope
        declared = self.scope.names.get("\0global")
        if declared and name in declared:
            scope = declared[name]
        if scope is not None:
            scope.names[name] = value

    def _name(self, value: Value, name: str) -> None:
        """An object is called what it is given to first."""
        thing = value.thing if isinstance(value, Instance) else value
        if isinstance(thing, Thing) and not thing.name:
            thing.name = name

    def unpack(self, targets: list[ast.expr], value: Value) -> None:
        """Give the parts of a value to several targets."""
        value = settled(value)
        count = len(targets)
        if isinstance(value, (list, tuple)) and not any(isinstance(t, ast.Starred) for t in targets):
            parts = list(value)[:count]
            parts += [Unknown("?") for _ in range(count - len(parts))]
        else:
            parts = [self.part(value, index) for index in range(count)]
        for target, part in zip(targets, parts, strict=True):
            self.bind(target, part)

    def part(self, value: Value, index: int) -> Value:
        """One element of an unpacked value."""
        if isinstance(value, Tensor):
            return derive(value)
        if isinstance(value, Unknown):
            return value.children.setdefault(f"[{index}]", Unknown(f"{value.name}[{index}]", value.tags, loaders=value.loaders))
        if isinstance(value, Stream):
            return self.first_of(value)
        return Unknown(f"?[{index}]", tags_of(value))

    def setattr(self, value: Value, name: str, new: Value, node: ast.AST) -> None:
        """Set an attribute of a value."""
        value = settled(value)
        setter = value.cls.lookup(f"{name}.setter") if isinstance(value, Instance) else None
        if setter is not None:
            self.call(setter, [value, new], {}, node)
        elif isinstance(value, Instance):
            new = counted(hinted(name, new), self.guard)
            self._note_replaced(value.thing, name, new, node, known=name in value.attrs)
            value.attrs[name] = new
            self._adopt(value.thing, new, name, node)
            changing = "epoch" in name or (bool(self.loops) and name in attributes_read(value.cls.node))
            if value.thing is not None and value.thing.kind == "dataset" and changing and self.calls[-1:] != ["__init__"]:
                place = self.outside([value.cls], node)
                self.emit(SetEpoch, node, place=place, target=value.thing, value=self.number("value"))
        elif isinstance(value, Thing):
            self.set_on_thing(value, name, new, node)
            if value.kind == "model":
                self._note_replaced(value, name, new, node, known=True)
                self._adopt(value, new, name, node)
            if value.kind != "param":
                value.attrs[name] = new
        elif isinstance(value, Unknown):
            value.children[f".{name}"] = hinted(name, new)
        elif isinstance(value, Class):
            value.scope.names[name] = new
        elif isinstance(value, Tensor) and name == "requires_grad" and new is True:
            value.grad, value.name = True, value.name if value.models else "parameter"
        self._name(new, name)

    def set_on_thing(self, thing: Thing, name: str, new: Value, node: ast.AST) -> None:
        """An attribute of a library object that means something is set."""
        raise NotImplementedError

    def take_in(self, container: Value, key: str, new: Value, node: ast.AST) -> None:
        """A module is put into a list or dict that a model holds."""
        owner = self.memo.get(("held", id(container)))
        if isinstance(owner, Thing):
            self._note_replaced(owner, key, new, node, known=False)
            self._adopt_all(owner, container, [new], key, node)

    def _adopt(self, owner: Thing | None, new: Value, name: str, node: ast.AST) -> None:
        """A module becomes a part of another one."""
        if isinstance(new, (list, dict, tuple)):
            self.memo[("held", id(new))], self.memo[("alive", id(new))] = owner, new
            self._adopt_all(owner, new, list(new.values()) if isinstance(new, dict) else list(new), name, node)
            return
        model = model_of(new)
        if owner is None or model is None or owner.kind != "model":
            return
        if owner not in model.family() and model not in owner.family():
            model.parents.append(owner)

    def _adopt_all(self, owner: Thing | None, container: Value, children: list[Value], name: str, node: ast.AST) -> None:
        """Modules in a container of a module: those in a plain list, tuple or dict are not among its parts."""
        for child in children[:50]:
            model = model_of(child)
            if self.memo.get(("registers", id(container))):
                self._adopt(owner, model, name, node)
            elif owner is not None and owner.kind == "model" and model is not None:
                model.facts["kept apart"] = (name, self.place(node))

    def _note_replaced(self, owner: Thing | None, name: str, new: Value, node: ast.AST, known: bool) -> None:
        module = model_of(new)
        if (
            not self.counters.get("optimizer")
            or owner is None
            or module is None
            or owner.kind != "model"
            or module.facts.get("inner") is not None
        ):
            return
        holders = [t for t in self.things if t.kind == "optimizer" and t.owners & owner.family()]
        if holders and not any(t.owners & module.family() for t in holders):
            classes = [i.cls for t in owner.family() if isinstance(i := t.facts.get("instance"), Instance)]
            place = self.place(node) if self.forwards else self.outside(classes, node)
            self.emit(ModuleReplaced, node, place=place, model=owner, module=module, optimizers=tuple(holders))

    def setitem(self, value: Value, key: Value, new: Value, node: ast.AST) -> None:
        """Set an item of a value."""
        value = settled(value)
        if isinstance(value, dict):
            with contextlib.suppress(TypeError):
                if key in value and "copied weights" in tags_of(value[key]):
                    self.say_averaged(node)
                value[key] = hinted(key, new) if isinstance(key, str) else new
            self.take_in(value, str(key) if isinstance(key, (str, int)) else "?", new, node)
            self._set_rate(self.memo.get(("group of", id(value))), key)
        elif isinstance(value, list) and isinstance(key, int) and -len(value) <= key < len(value):
            value[key] = new
        elif isinstance(value, Unknown) and isinstance(key, str):
            value.children[f"[{key!r}]"] = new
        elif isinstance(value, Thing) and value.kind == "defaultdict" and isinstance(key, (str, int)):
            value.facts.setdefault("table", {})[key] = new
        elif isinstance(value, External) and key == "CUDA_VISIBLE_DEVICES":
            self.emit(Made, node, what=self.make("device choice", None), facts={})
        elif isinstance(value, Thing) and value.kind == "model":
            self._note_replaced(value, str(key), new, node, known=True)
            self._adopt(value, new, str(key), node)

    def _set_rate(self, optimizer: Value, key: Value) -> None:
        """The program writes a learning rate over what its schedulers have set."""
        for thing in self.things if optimizer is not None and key == "lr" else ():
            if thing.kind == "scheduler" and thing.facts.get("optimizer") is optimizer:
                thing.facts["overwritten"] = True


def _adds_to(target: ast.expr, value: ast.expr) -> bool:
    """Whether a sum of the target and something else is assigned to it."""
    sums = [n for n in ast.walk(value) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add)]
    name = ast.unparse(target) if sums and isinstance(target, (ast.Name, ast.Attribute, ast.Subscript)) else None
    parts = (n for total in sums for n in ast.walk(total) if isinstance(n, (ast.Name, ast.Attribute, ast.Subscript)))
    return isinstance(value, (ast.BinOp, ast.IfExp)) and name is not None and any(ast.unparse(n) == name for n in parts)


def _loaded(target: ast.expr) -> ast.expr:
    if isinstance(target, ast.Attribute):
        return ast.Attribute(target.value, target.attr, ast.Load())
    if isinstance(target, ast.Subscript):
        return ast.Subscript(target.value, target.slice, ast.Load())
    return target
