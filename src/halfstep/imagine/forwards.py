"""The forward pass of a model, followed into the program's own `forward`, and what comes out of it."""

from __future__ import annotations

import ast

from halfstep.events.vocabulary import Forward
from halfstep.imagine.arithmetic import region_dtype
from halfstep.imagine.project import text_of
from halfstep.imagine.state import State
from halfstep.imagine.values import External, Function, Instance, Tensor, Thing, Unknown, Value, derive, flat, parts_of, settled


class Forwards(State):
    """Calls models."""

    def call_function(
        self, func: Function, args: list[Value], kwargs: dict[str, Value], node: ast.AST, self_value: Value = None
    ) -> Value:
        """Call a function of the program."""
        raise NotImplementedError

    def forward(self, model: Thing, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
        """A model's forward pass, followed into the program's own `forward`."""
        outermost = self.forwards == 0
        if outermost:
            self._say_forward(model, node)
        self.forwards += 1
        inside: Value = None
        try:
            inside = self._forward_of_program(model, args, kwargs, node)
        finally:
            self.forwards -= 1
        parents = [v for v in flat([*args, *kwargs.values()]) if isinstance(v, Tensor)]
        if isinstance(inside, (tuple, list, dict)) and inside:
            return _stamped(self, inside, model, parents, outermost, node)
        return self.output_of(model, inside, parents, outermost, node)

    def _say_forward(self, model: Thing, node: ast.AST) -> None:
        self.emit(
            Forward,
            node,
            model=model,
            training=model_training(model),
            grad_enabled=self.grad_enabled,
            wrapped=model.facts.get("wrapper") == "ddp",
            region=self.region,
            device=model_device(model),
            partly_frozen=bool(model.facts.get("partly frozen")),
            mode_dependent=_holds(model, "mode_dependent"),
            buffers=_holds(model, "buffers"),
        )

    def _forward_of_program(self, model: Thing, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
        inner = model.facts.get("inner")
        if isinstance(inner, Thing):
            return self._forward_of_program(inner, args, kwargs, node)
        parts = model.facts.get("layers")
        if isinstance(parts, list):
            value: Value = args[0] if args else None
            for part in parts[:20]:
                value = self.call(part, [value], {}, node)
            return value
        instance = model.facts.get("instance")
        method = instance.cls.lookup("forward") if isinstance(instance, Instance) else None
        if isinstance(method, Function):
            model.facts["followed"] = True
            return self.call_function(method, [instance, *args], kwargs, node)
        return None

    def output_of(self, model: Thing, inside: Value, parents: list[Tensor], outermost: bool, node: ast.AST) -> Tensor:
        """The tensor that comes out of a model."""
        inside = settled(inside)
        base = inside if isinstance(inside, Tensor) else derive(*parents) if parents else Tensor()
        dtype = base.dtype if isinstance(inside, Tensor) else region_dtype(self) or _param_dtype(model)
        frozen = model.facts.get("frozen") is True or _is_plain(model)
        made = derive(
            base,
            grad=(self.grad_enabled and not frozen) or base.grad,
            dtype=dtype,
            models=base.models | ({model} if self.grad_enabled and not frozen else set()),
            tags=base.tags | {"data"},
        )
        made.divisors = () if not isinstance(inside, Tensor) else base.divisors
        if outermost and self.region is not None and self.region not in made.regions:
            made.regions = (*made.regions, self.region)
        if not self.grad_enabled:
            made.grad, made.models = False, frozenset()
        if outermost:
            self._mark_distribution(model, made, node)
        return made

    def _mark_distribution(self, model: Thing, made: Tensor, node: ast.AST) -> None:
        if model_training(model) is False:
            made.eval_models |= {model}
        if model.facts.get("wrapper") == "ddp":
            made.ddp |= {model}
            made.no_sync = bool(self.no_sync)
        elif any(parent.facts.get("wrapper") == "ddp" for parent in model.family()) and self.grad_enabled:
            held = [member.facts.get("instance") for member in model.family()]
            made.bypassed = self.outside([i.cls for i in held if isinstance(i, Instance)], node)


def _is_plain(model: Thing) -> bool:
    """Whether a module of the program surely has no parameters: it holds nothing but plain values."""
    instance = model.facts.get("instance")
    if not isinstance(instance, Instance) or not all(isinstance(b, External) and b.last == "Module" for b in instance.cls.bases):
        return False
    held = [settled(value) for value in instance.attrs.values()]
    return all(v is None or isinstance(v, (int, float, str)) for v in held) and "forward" in instance.cls.scope.names


def model_training(model: Thing) -> bool | None:
    """Whether a model is in training mode, asking what it wraps and what it is part of."""
    return model.training


def model_device(model: Thing) -> str | None:
    """Where a model's parameters are, if that was said."""
    inner = model.facts.get("inner")
    if model.device is None and isinstance(inner, Thing):
        return model_device(inner)
    return model.device


def _holds(model: Thing, fact: str) -> bool | None:
    """Whether a model or a part of it has this property; None where a part is unknown."""
    known = model.facts.get(fact)
    if isinstance(known, bool):
        return known
    inner = model.facts.get("inner")
    if isinstance(inner, Thing):
        return _holds(inner, fact)
    instance = model.facts.get("instance")
    if not isinstance(instance, Instance):
        return None
    answers = {_holds(child, fact) for child in parts_of(model)}
    own = fact == "buffers" and "register_buffer" in text_of(instance.cls.node)
    return True if own or True in answers else None if None in answers else False


def _param_dtype(model: Thing) -> str | None:
    return {"float16": "half", "bfloat16": "bfloat"}.get(model.dtype or "")


def _stamped(state: Forwards, inside: Value, model: Thing, parents: list[Tensor], outermost: bool, node: ast.AST) -> Value:
    def stamp(value: Value) -> Value:
        """Stamp."""
        value = settled(value)
        if isinstance(value, (Tensor, Unknown)) or value is None:
            return state.output_of(model, value, parents, outermost, node)
        return value

    if isinstance(inside, dict):
        return {key: stamp(item) for key, item in inside.items()}
    return type(inside)([stamp(item) for item in inside]) if type(inside) in (list, tuple) else inside
