"""Backward passes: which optimizers they reach, through which forward passes, scaled and divided by what."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.events.vocabulary import Backward, Divisor, HostRead, Numeric, Place, Ref
from halfstep.record.graph import Reading, marked, read
from halfstep.record.patches import Patches
from halfstep.record.places import Here
from halfstep.record.recorder import Recorder

WARM = 64
"""Backward passes from one line that are read in full; later, one in `EVERY`."""
EVERY = 16
LOOKS = 16
"""Of those, how many may wait for a device."""


@dataclass(slots=True)
class _Line:
    """What is known of the backward passes from one stack of lines."""

    stack: tuple[Place, ...]
    """Kept, so that its identity stays its own."""
    seen: int = 0
    reading: Reading | None = None
    optimizers: tuple[Ref, ...] = ()
    firsts: tuple[tuple[Ref, weakref.ref[torch.Tensor]], ...] = ()
    """Of each of them, one parameter that is reached."""
    models: tuple[Ref, ...] = ()


def install(patches: Patches, rec: Recorder) -> None:
    """Hear backward passes."""
    lines: dict[int, _Line] = {}
    patches.wrap(torch.autograd, "backward", lambda original: _backing(original, rec, lines))
    patches.wrap(torch.autograd, "grad", lambda original: _asking(original, rec))
    patches.wrap(torch.Tensor, "item", lambda original: _reading(original, rec))


def _asking(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def grad(*args: Any, **kwargs: Any) -> Any:
        if rec.notes and not rec.quiet and not rec.inside:
            with rec.safe:
                rec.say(Numeric, rec.here(), kind="gradients of inputs")
        return original(*args, **kwargs)

    return grad


def _backing(original: Callable[..., Any], rec: Recorder, lines: dict[int, _Line]) -> Callable[..., Any]:
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        line = None
        if rec.hears and not rec.inside:
            with rec.safe:
                loss = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
                if isinstance(loss, torch.Tensor) and loss.grad_fn is not None:
                    line = _say(rec, loss, grad_tensors, lines)
        done = original(tensors, grad_tensors, *args, **kwargs)
        if line is not None:
            with rec.safe:
                rec.written.update((optimizer, (first, _written(first()))) for optimizer, first in line.firsts)
        return done

    return backward


def _written(parameter: torch.Tensor | None) -> tuple[int, int]:
    """Which gradient a parameter has, and how often it was written."""
    gradient = parameter.grad if parameter is not None else None
    return (id(gradient), gradient._version) if gradient is not None and not gradient.is_inference() else (0, 0)


def edited(rec: Recorder, optimizer: Ref) -> bool:
    """Whether the script itself wrote over an optimizer's gradients since the last backward."""
    first, before = rec.written.pop(optimizer, (None, (0, 0)))
    return first is not None and before != (0, 0) and _written(first()) not in (before, (0, 0))


def _say(rec: Recorder, loss: torch.Tensor, gradient: Any, lines: dict[int, _Line]) -> _Line | None:
    if rec.resting:
        for listener in rec.listeners:
            listener.backward_begins(loss, None)
        return None
    here = rec.here(depth=4)
    line = lines.setdefault(id(here.stack), _Line(here.stack))
    line.seen += 1
    if line.reading is None or line.seen <= WARM or line.seen % EVERY == 0:
        line.reading = read(loss.grad_fn, look=line.seen <= LOOKS)
        held = {o: weakref.ref(leaf) for leaf in reversed(line.reading.leaves) for o in rec.objects.owners(leaf)}
        line.firsts = tuple(reversed(held.items()))
        line.optimizers = tuple(optimizer for optimizer, _ in line.firsts)
        models = (rec.objects.model_of(leaf) for leaf in line.reading.leaves)
        line.models = tuple(dict.fromkeys(m for m in models if m is not None))
        _notice_clearing(rec, line, here)
        line.reading.leaves = []
    for listener in rec.listeners:
        listener.backward_begins(loss, here.place)
    rec.say(Backward, here, **_fields(rec, loss, gradient, line, here))
    return line


def _fields(rec: Recorder, loss: torch.Tensor, gradient: Any, line: _Line, here: Here) -> dict[str, Any]:
    reading = line.reading
    assert reading is not None
    passes = [(model, rec.passes[model]) for model in line.models if model in rec.passes]
    ddp = tuple(m for m, p in passes if m in rec.ddp and not p.bypass)
    in_no_sync = any((w := rec.ddp[m]()) is not None and not w.require_backward_grad_sync for m in ddp)
    bypass = next((p.here.place for _, p in passes if p.bypass), None)
    assert loss.grad_fn is not None
    scaler = marked(loss.grad_fn) if reading.scaler is None else reading.scaler
    return {
        "optimizers": line.optimizers,
        "models": line.models,
        "scaler": scaler,
        "divisors": () if here.engine else reading.divisors + _by_gradient(gradient),
        "reduction": reading.reduction,
        "region": rec.region(),
        "forward_regions": tuple(dict.fromkeys(r for _, p in passes for r in p.regions)),
        "in_no_sync": in_no_sync,
        "forward_in_no_sync": any(p.in_no_sync for _, p in passes) if ddp else None,
        "ddp": ddp,
        "bypassed": bypass,
        "eval_mode": tuple(m for m, p in passes if not p.training),
        "half_params": tuple(m for m in line.models if m in rec.half_models),
        "by_framework": here.framework,
    }


def _by_gradient(gradient: Any) -> tuple[Divisor, ...]:
    """`loss.backward(torch.tensor(1 / k))` divides by k."""
    if isinstance(gradient, torch.Tensor) and gradient.numel() == 1 and gradient.device.type == "cpu":
        value = float(gradient)
        return (Divisor(1.0 / value),) if 0.0 < value < 1.0 else ()
    return ()


def _notice_clearing(rec: Recorder, line: _Line, here: Here) -> None:
    """Gradients that the script clears by hand: those of a reached parameter are gone since the last backward pass."""
    assert line.reading is not None
    for optimizer in line.optimizers:
        if optimizer in rec.filled and all(
            leaf.grad is None for leaf in line.reading.leaves if optimizer in rec.objects.owners(leaf)
        ):
            rec.cleared(here, (optimizer,))
        rec.filled.add(optimizer)


def _reading(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def item(self: torch.Tensor) -> Any:
        node = self.grad_fn
        if (self.is_cuda or node is not None) and rec.notes and not rec.inside:
            with rec.safe:
                scaled = node is not None and marked(node) is not None
                if self.is_cuda or scaled:
                    rec.say(HostRead, rec.here(), what=".item()", scaled=scaled, device=self.device.type)
        return original(self)

    return item
