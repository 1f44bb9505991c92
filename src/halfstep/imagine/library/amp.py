"""Autocast and loss scaling."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from halfstep.events.vocabulary import Region
from halfstep.imagine.library.formats import dtype_name
from halfstep.imagine.library.tensors import device_name
from halfstep.imagine.values import Partial, Thing, Unknown, Value, settled

if TYPE_CHECKING:
    from halfstep.imagine.calls import Calls

Args = list[Value]
Kwargs = dict[str, Value]


def _scaler(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    old = path.startswith(("torch.cuda.amp", "torch.cpu.amp"))
    enabled = kwargs.get("enabled", args[5] if len(args) > 5 else args[4] if old and len(args) > 4 else True)
    on = state.truth(enabled, node)
    device = "cuda" if path.startswith("torch.cuda") else device_name(args[0] if args and not old else kwargs.get("device"))
    return state.make("scaler", node, enabled=on, device=device, said=device is not None)


def _autocast(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    fixed = "cuda" if path.startswith("torch.cuda") else "cpu" if path.startswith("torch.cpu") else None
    positional = ["enabled", "dtype"] if fixed else ["device_type", "dtype", "enabled"]
    given = {**dict(zip(positional, args, strict=False)), **kwargs}
    device = fixed or device_name(given.get("device_type"))
    enabled = given.get("enabled", True)
    on = state.truth(enabled, node)
    dtype_value = settled(given.get("dtype", state.memo.get(("autocast dtype", device))))
    dtype = {"cuda": "float16", "cpu": "bfloat16"}.get(device or "") if dtype_value is None else dtype_name(dtype_value)
    if dtype == "float32":
        on = False
    place = state.place(node)
    given_dtype = dtype_value is not None

    def region() -> Region:
        return Region(state.number("region"), device, dtype, on, place, given_dtype)

    return state.make("context", node, what="autocast", region=region)


def _default_dtype(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    """What autocast casts to on a device from now on, where it is not told."""
    device = "cpu" if "cpu" in path else "cuda" if "gpu" in path else device_name(args[0] if args else kwargs.get("device_type"))
    state.memo["autocast dtype", device] = args[-1] if args else kwargs.get("dtype")
    return None


def _context(what: str) -> Callable[..., Value]:
    def handler(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
        kind, sets = what, path.endswith("set_grad_enabled")
        if sets:
            kind = "enable_grad" if not args or state.truth(args[0], node) else "no_grad"
        if path.endswith("inference_mode") and args and args[0] is False:
            kind = "null"
        return state.make("context", node, what=kind, value=args[0] if args else None, sets=sets)

    return handler


def _stack(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    made = state.make("stack", None)
    made.facts["open"] = []
    return made


def scaler_off(scaler: Thing) -> bool:
    """Whether a scaler does nothing."""
    return scaler.facts.get("enabled") is False


def _wrapped_scaler(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    scaler = state.make("scaler", node, enabled=True, device="cuda")
    made = state.make("context", None, what="native scaler", scaler=scaler)
    made.kind = "native scaler"
    return made


TABLE: dict[str, Callable[..., Value]] = {
    "torch.autocast": _autocast,
    "torch.amp.autocast": _autocast,
    "torch.cuda.amp.autocast": _autocast,
    "torch.cpu.amp.autocast": _autocast,
    "torch.amp.GradScaler": _scaler,
    "torch.GradScaler": _scaler,
    "torch.cuda.amp.GradScaler": _scaler,
    "torch.cpu.amp.GradScaler": _scaler,
    "torch.set_autocast_dtype": _default_dtype,
    "torch.set_autocast_gpu_dtype": _default_dtype,
    "torch.set_autocast_cpu_dtype": _default_dtype,
    "torch.no_grad": _context("no_grad"),
    "torch.inference_mode": _context("no_grad"),
    "torch.enable_grad": _context("enable_grad"),
    "torch.set_grad_enabled": _context("no_grad"),
    "torch.is_grad_enabled": lambda s, n, a, k, p: s.grad_enabled,
    "contextlib.nullcontext": _context("null"),
    "contextlib.suppress": _context("null"),
    "contextlib.ExitStack": _stack,
}
"""Handlers by path."""
PATTERNS: tuple[tuple[re.Pattern[str], Callable[..., Value]], ...] = (
    (re.compile(r"(^|\.)ShardedGradScaler$"), _scaler),
    (re.compile(r"(^|\.)NativeScaler(WithGradNormCount)?$"), _wrapped_scaler),
)
"""Handlers by pattern of the path."""

__all__ = ["PATTERNS", "TABLE", "Partial", "Unknown", "scaler_off"]
