"""Optimizers, loss scalers, clipping and schedulers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from halfstep.events.vocabulary import Clip, Load, Ref, ScaleLoss, ScaleRead, ScalerUpdate, SchedulerStep, Step, Unscale
from halfstep.record.graph import mark
from halfstep.record.hooks.backward import edited
from halfstep.record.objects import Known
from halfstep.record.patches import Patches
from halfstep.record.places import NOWHERE, Here
from halfstep.record.recorder import Recorder


def install(patches: Patches, rec: Recorder) -> None:
    """Hear what steps."""
    optimizer = torch.optim.Optimizer
    patches.wrap(optimizer, "__init__", lambda original: _making_optimizer(original, rec))
    patches.wrap(optimizer, "add_param_group", lambda original: _adding(original, rec))
    patches.wrap(optimizer, "zero_grad", lambda original: _clearing(original, rec))
    patches.wrap(optimizer, "load_state_dict", lambda original: _loading(original, rec, rec.optimizer))
    patches.keep(register_optimizer_step_pre_hook(lambda *given: _step_begins(rec, *given)))
    patches.keep(register_optimizer_step_post_hook(lambda *given: _step_ended(rec, *given)))
    scaler = torch.amp.grad_scaler.GradScaler
    patches.wrap(scaler, "__init__", lambda original: _making_scaler(original, rec))
    patches.wrap(scaler, "scale", lambda original: _scaling(original, rec))
    patches.wrap(scaler, "unscale_", lambda original: _unscaling(original, rec))
    patches.wrap(scaler, "step", lambda original: _stepping(original, rec))
    patches.wrap(scaler, "update", lambda original: _updating(original, rec))
    patches.wrap(scaler, "get_scale", lambda original: _reading_scale(original, rec))
    patches.wrap(scaler, "load_state_dict", lambda original: _loading(original, rec, _scaler_of(rec)))
    for name, kind in (("clip_grad_norm_", "norm"), ("clip_grad_value_", "value")):
        for owner in (clip_grad, torch.nn.utils):
            patches.wrap(owner, name, lambda original, kind=kind: _clipping(original, rec, kind))  # type: ignore[misc]
    for cls in _schedulers():
        if "__init__" in vars(cls):
            patches.wrap(cls, "__init__", lambda original: _making_scheduler(original, rec))
        if "step" in vars(cls):
            patches.wrap(cls, "step", lambda original: _moving(original, rec))


def _schedulers() -> list[type]:
    found = [c for c in vars(lr_scheduler).values() if isinstance(c, type) and issubclass(c, lr_scheduler.LRScheduler)]
    return list(dict.fromkeys(found))


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


# --- optimizers ---


def _making_optimizer(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def __init__(self: torch.optim.Optimizer, params: Any, defaults: dict[str, Any]) -> None:  # noqa: N807
        original(self, params, defaults)
        if rec.hears and rec.objects.find(self) is None:
            with rec.safe:
                known = rec.made(self, "optimizer", rec.here(), **{"class": type(self).__name__})
                rec.met(known, self)

    return __init__


def _adding(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        original(self, param_group)
        known = rec.objects.find(self)
        if known is not None:
            rec.objects.own(known.ref, self.param_groups[-1]["params"])

    return add_param_group


def _clearing(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def zero_grad(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        if rec.notes:
            with rec.safe:
                here = rec.here()
                rec.cleared(here, (rec.optimizer(self, here).ref,))
        original(self, *args, **kwargs)

    return zero_grad


def _scaler_of(rec: Recorder) -> Callable[[Any, Here], Known]:
    return lambda scaler, here: rec.objects.known(scaler, "scaler", here.place)


def _loading(original: Callable[..., Any], rec: Recorder, known: Callable[[Any, Here], Known]) -> Callable[..., Any]:
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if rec.hears:
            with rec.safe:
                here = rec.here()
                rec.say(Load, here, target=known(self, here).ref)
        return original(self, *args, **kwargs)

    return load_state_dict


def _step_begins(rec: Recorder, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if rec.hears and rec.stepping is None and not _closure(args, kwargs):
        with rec.safe:
            if not rec.resting:
                say_step(rec, optimizer, rec.here(depth=5), closure=False)


def _step_ended(rec: Recorder, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if rec.hears and rec.stepping is None:
        with rec.safe:
            if _closure(args, kwargs) and not rec.resting:
                say_step(rec, optimizer, rec.here(depth=5), closure=True)
            rec.stepped(optimizer, None)


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None


def say_step(rec: Recorder, optimizer: torch.optim.Optimizer, here: Here, *, closure: bool) -> None:
    """An optimizer steps, alone or through a scaler."""
    known = rec.optimizer(optimizer, here)
    facts = known.facts
    _say_edited(rec, (known.ref,), here)
    if rec.replaced:
        rec.taken_in(known.ref, _params(optimizer))
    if "half" not in facts:
        params = _params(optimizer)
        models = [(rec.objects.model_of(p) or known.ref, p.dtype) for p in params]
        facts["half"] = tuple(dict.fromkeys(m for m, dtype in models if dtype is torch.float16))
        facts["bf16"] = tuple(dict.fromkeys(m for m, dtype in models if dtype is torch.bfloat16))
    rec.say(
        Step,
        here,
        optimizer=known.ref,
        scaler=rec.stepping,
        closure=closure,
        region=rec.region(),
        half_params=facts["half"],
        bf16_params=facts["bf16"],
    )


def _say_edited(rec: Recorder, optimizers: tuple[Ref, ...], here: Here) -> None:
    """Say so where the script wrote over gradients by hand: it may have divided them."""
    by_hand = tuple(optimizer for optimizer in optimizers if edited(rec, optimizer))
    if by_hand:
        rec.say(Clip, here, optimizers=by_hand, kind="divide")


# --- loss scalers ---


def _making_scaler(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        if rec.hears and rec.objects.find(self) is None:
            with rec.safe:
                refused = not self._enabled and bool(args[5] if len(args) > 5 else kwargs.get("enabled", True))
                rec.made(self, "scaler", rec.here(), enabled=bool(self._enabled), refused=refused)

    return __init__


def _scaling(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if rec.notes and self.is_enabled():
            with rec.safe:
                here = rec.here()
                ref = rec.objects.known(self, "scaler", here.place).ref
                for tensor in tree_leaves(scaled):
                    if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                        mark(tensor.grad_fn, ref)
                rec.say(ScaleLoss, here, scaler=ref)
        return scaled

    return scale


def _unscaling(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def unscale_(self: Any, optimizer: torch.optim.Optimizer) -> Any:
        if rec.notes and self.is_enabled() and rec.stepping is None:
            with rec.safe:
                here = rec.here()
                scaler, held = rec.objects.known(self, "scaler", here.place).ref, rec.optimizer(optimizer, here).ref
                rec.rewritten((held,))
                rec.say(Unscale, here, scaler=scaler, optimizer=held)
        return original(self, optimizer)

    return unscale_


def _stepping(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def step(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not rec.hears or not self.is_enabled():
            return original(self, optimizer, *args, **kwargs)
        with rec.safe:
            here = rec.here() if not rec.resting else NOWHERE
            rec.stepping = rec.objects.known(self, "scaler", here.place).ref
            if not rec.resting:
                say_step(rec, optimizer, here, closure=bool(args) or "closure" in kwargs)
            for listener in rec.listeners:
                listener.step_begins(optimizer, self)
        try:
            return original(self, optimizer, *args, **kwargs)
        finally:
            rec.stepping = None
            with rec.safe:
                rec.stepped(optimizer, self)

    return step


def _updating(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not rec.hears or not self.is_enabled():
            return original(self, *args, **kwargs)
        here = rec.here() if not rec.resting else NOWHERE
        done = original(self, *args, **kwargs)
        with rec.safe:
            scale = self._scale
            known = float(scale) if scale is not None and scale.device.type == "cpu" else None
            if not rec.resting:
                rec.say(ScalerUpdate, here, scaler=rec.objects.known(self, "scaler", here.place).ref, scale=known)
            rec.scaler_updated(self)
        return done

    return update


def _reading_scale(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def get_scale(self: Any) -> float:
        if rec.notes and self.is_enabled():
            with rec.safe:
                rec.say(ScaleRead, rec.here())
        scale = float(original(self))
        if self.is_enabled():
            rec.scale_read = scale
        return scale

    return get_scale


# --- clipping ---


SHARE_OF_SCALE = 0.01
"""A limit of so much of the loss scale that the script has read was multiplied by it, as the gradients are."""


def _clipping(original: Callable[..., Any], rec: Recorder, kind: str) -> Callable[..., Any]:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not rec.notes or rec.quiet:
            return original(parameters, *args, **kwargs)
        generator = isinstance(parameters, Iterator)
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        empty = generator and not given
        with rec.safe:
            owners = dict.fromkeys(o for p in given for o in rec.objects.owners(p))
            here = rec.here()
            _say_edited(rec, tuple(owners), here)
            partial = tuple(o for o in owners if _left_out(rec, o, given))
            limit = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))
            how = "scaled" if isinstance(limit, float) and limit >= SHARE_OF_SCALE * rec.scale_read else kind
            rec.say(Clip, here, optimizers=tuple(owners), kind=how, partial=partial, exhausted=empty)
        return original((p for p in given) if empty else given, *args, **kwargs)

    return clip


def _left_out(rec: Recorder, owner: Any, given: list[torch.Tensor]) -> bool:
    """Whether parameters of an optimizer that have gradients are not among those given."""
    ids = set(map(id, given))
    return any(id(p) not in ids and p.grad is not None for p in rec.objects.held(owner))


# --- schedulers ---


def _making_scheduler(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if rec.quiet or not rec.hears:
            original(self, *args, **kwargs)
            return
        here = rec.here()
        rec.quiet += 1
        try:
            original(self, *args, **kwargs)
        finally:
            rec.quiet -= 1
        with rec.safe:
            _note_scheduler(rec, self, here, inspect.signature(original).bind_partial(self, *args, **kwargs).arguments)

    return __init__


def _note_scheduler(rec: Recorder, scheduler: Any, here: Here, bound: dict[str, Any]) -> None:
    """What is known of how a scheduler was made."""
    optimizer = bound.get("optimizer")
    holder = rec.optimizer(optimizer, here).ref if isinstance(optimizer, torch.optim.Optimizer) else None
    plain = {k: v for k, v in bound.items() if k not in ("self", "optimizer") and isinstance(v, (int, float, str, list, tuple))}
    plain = {k: v for k, v in plain.items() if not isinstance(v, (list, tuple)) or all(isinstance(i, int) for i in v)}
    known = rec.made(scheduler, "scheduler", here, args=plain, optimizer=holder, **{"class": type(scheduler).__name__})
    for inner in bound.get("schedulers", ()):
        part = rec.objects.find(inner)
        if part is not None:
            part.facts["part of"] = known.ref


def _moving(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if rec.quiet or not rec.notes:
            return original(self, *args, **kwargs)
        with rec.safe:
            here = rec.here()
            known = rec.objects.known(self, "scheduler", here.place)
            optimizer = getattr(self, "optimizer", None)
            holder = rec.optimizer(optimizer, here).ref if isinstance(optimizer, torch.optim.Optimizer) else None
            argument = bool(args or kwargs)
            rec.say(SchedulerStep, here, scheduler=known.ref, optimizer=holder, argument=argument, metric="")
        rec.quiet += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            rec.quiet -= 1

    return step
