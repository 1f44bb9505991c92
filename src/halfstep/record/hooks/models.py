"""Forward passes, modes, autocast regions and replaced modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss

from halfstep.events.vocabulary import AutocastEnter, AutocastExit, Forward, Loss, Made, Mode, ModuleReplaced, Region
from halfstep.record.objects import Known
from halfstep.record.patches import Patches
from halfstep.record.places import NOWHERE, Here
from halfstep.record.recorder import Pass, Recorder

_DEPENDENT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.modules.batchnorm._BatchNorm)


def install(patches: Patches, rec: Recorder) -> None:
    """Hear models."""
    patches.wrap(nn.Module, "__call__", lambda original: _calling(original, rec))
    patches.wrap(nn.Module, "train", lambda original: _switching(original, rec))
    patches.wrap(nn.Module, "zero_grad", lambda original: _clearing(original, rec))
    for name in ("to", "half", "bfloat16"):
        patches.wrap(nn.Module, name, lambda original: _casting(original, rec))
    autocast = torch.amp.autocast_mode.autocast
    patches.wrap(autocast, "__init__", _remembering)
    patches.wrap(autocast, "__enter__", lambda original: _entering(original, rec))
    patches.wrap(autocast, "__exit__", lambda original: _leaving(original, rec))
    patches.keep(torch.nn.modules.module.register_module_module_registration_hook(_replacing(rec)))


def _calling(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if rec.inside or not rec.hears:
            return original(self, *args, **kwargs)
        rec.inside = True
        try:
            with rec.safe:
                say_forward(rec, self, (args, kwargs))
            return original(self, *args, **kwargs)
        finally:
            rec.inside = False
            rec.current = None

    return __call__


def say_forward(rec: Recorder, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """The outermost call of a module."""
    if rec.resting:
        _tell(rec, module, inputs)
        return
    here = rec.here(depth=4)
    if isinstance(module, _Loss):
        rec.say(Loss, here, criterion=type(module).__name__, reduction=module.reduction, region=rec.region())
        return
    known = model_known(rec, module, here)
    facts = known.facts
    if not facts["parameters"]:
        return
    _tell(rec, module, inputs)
    region = rec.region()
    wrapped = facts.get("wrapper") == "ddp"
    training = module.module.training if wrapped else module.training  # type: ignore[union-attr]
    in_no_sync = getattr(module, "require_backward_grad_sync", True) is False
    rec.current = Pass([region] if region is not None else [], training, in_no_sync, here, bypass=facts.get("ddp") is not None)
    rec.passes[facts.get("ddp", known.ref)] = rec.current
    rec.say(
        Forward,
        here,
        model=known.ref,
        training=training,
        grad_enabled=torch.is_grad_enabled(),
        wrapped=wrapped,
        region=region,
        device=facts["device"],
        mode_dependent=facts["mode_dependent"],
        buffers=facts["buffers"],
    )


def _tell(rec: Recorder, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    for listener in rec.listeners:
        listener.forward_begins(module, inputs)


def model_known(rec: Recorder, module: nn.Module, here: Here) -> Known:
    """A model, looked at once."""
    known = rec.objects.find(module) or rec.objects.known(module, "model", here.place)
    if "parameters" not in known.facts:
        first = next(module.parameters(), None)
        known.facts.update(
            parameters=first is not None,
            device=first.device.type if first is not None else None,
            mode_dependent=any(isinstance(m, _DEPENDENT) for m in module.modules()),
            buffers=next(module.buffers(), None) is not None,
        )
        rec.objects.hold(known.ref, module, wrapper=known.facts.get("wrapper") == "ddp")
        if any(p.dtype is torch.float16 and p.requires_grad for p in module.parameters()):
            rec.half_models.add(known.ref)
    return known


def _switching(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def train(self: nn.Module, mode: bool = True) -> Any:
        if rec.quiet or rec.inside or not rec.hears:
            return original(self, mode)
        rec.quiet += 1
        rec.turns()
        try:
            with rec.safe:
                here = rec.here()
                if here.place is not None and next(self.parameters(), None) is not None:
                    rec.say(Mode, here, model=model_known(rec, self, here).ref, training=mode)
            return original(self, mode)
        finally:
            rec.quiet -= 1

    return train


def _casting(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def cast(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if rec.quiet or rec.inside or not rec.hears:
            return original(self, *args, **kwargs)
        before = _low(self)
        rec.quiet += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            rec.quiet -= 1
            with rec.safe:
                if _low(self) and not before:
                    here = rec.here()
                    known = rec.objects.find(self) or rec.objects.new(self, "model", here.place)
                    known.facts["cast at"] = here.place
                    rec.say(Made, here, what=known.ref, facts=known.facts)

    return cast


def _low(module: nn.Module) -> bool:
    """Whether a model's parameters are stored in FP16 or BF16."""
    first = next(module.parameters(), None)
    return first is not None and first.dtype in (torch.float16, torch.bfloat16)


def _clearing(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def zero_grad(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if rec.notes:
            with rec.safe:
                owners = dict.fromkeys(o for p in self.parameters() for o in rec.objects.owners(p))
                rec.cleared(rec.here(), tuple(owners))
        original(self, *args, **kwargs)

    return zero_grad


def _remembering(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, device_type, dtype, *args, **kwargs)
        self._halfstep_dtype_given = dtype is not None
        self._halfstep_refused = not self._enabled and bool(args[0] if args else kwargs.get("enabled", True))

    return __init__


def _entering(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def __enter__(self: Any) -> Any:  # noqa: N807
        entered = original(self)
        if rec.hears:
            with rec.safe:
                here = rec.here() if not rec.resting else NOWHERE
                given = getattr(self, "_halfstep_dtype_given", True)
                dtype = str(self.fast_dtype).removeprefix("torch.")
                refused = getattr(self, "_halfstep_refused", False)
                region = Region(rec.number("region"), self.device, dtype, bool(self._enabled), here.place, given, refused)
                rec.regions.append(region)
                if rec.current is not None and region.enabled:
                    rec.current.regions.append(region)
                if not rec.resting:
                    rec.say(AutocastEnter, here, region=region)
        return entered

    return __enter__


def _leaving(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def __exit__(self: Any, *error: Any) -> Any:  # noqa: N807
        if rec.hears and rec.regions:
            with rec.safe:
                region = rec.regions.pop()
                if not rec.resting:
                    rec.say(AutocastExit, rec.here(), region=region)
        return original(self, *error)

    return __exit__


def _replacing(rec: Recorder) -> Callable[..., None]:
    def hook(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        before = module._modules.get(name)
        if before is None or submodule is None or before is submodule or not rec.hears:
            return
        with rec.safe:
            owners = dict.fromkeys(o for p in module.parameters() for o in rec.objects.owners(p))
            if owners and any(p.requires_grad for p in submodule.parameters()):
                here = rec.here()
                new = rec.objects.known(submodule, "model", here.place).ref
                model = model_known(rec, module, here).ref
                draft = rec.say(ModuleReplaced, here, model=model, module=new, optimizers=tuple(owners))
                rec.replaced.append((draft, weakref.ref(submodule)))

    return hook
