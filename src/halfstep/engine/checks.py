"""What must hold before the first update."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.distributed.shards import local
from halfstep.errors import ConfigError, DataError, ModelError


def check_optimizers(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """See that the engine can drive these optimizers, and that they train this model.

    Raises:
        ModelError: there is none, one runs its own closure, one holds none of the model's trainable parameters, or two hold
            the same one.
    """
    if not optimizers:
        raise ModelError("The list of optimizers is empty; give at least one over the model's parameters.")
    trained = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise ModelError("The model has no parameter that needs gradients; un-freeze some with `requires_grad_(True)`.")
    seen: set[int] = set()
    for optimizer in optimizers:
        _check_step(optimizer)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not held & trained.keys():
            raise ModelError(
                f"The {type(optimizer).__name__} holds none of the model's trainable parameters. Make it from "
                "`model.parameters()` after the model has its final form (moved, converted, adapters added)."
            )
        if twice := [name for key, name in trained.items() if key in held & seen]:
            raise ModelError(f"Two optimizers hold the parameter `{twice[0]}`; each parameter is stepped by one of them.")
        seen |= held


def _check_step(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ModelError(f"`optimizer` is a {type(optimizer).__name__}; give a `torch.optim.Optimizer`, or a list of them.")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    needed = closure is not None and closure.default is inspect.Parameter.empty
    if isinstance(optimizer, torch.optim.LBFGS) or needed:
        raise ModelError(
            f"{type(optimizer).__name__} evaluates the loss several times in one step through a closure, which accumulation, "
            "loss scaling and one-read clipping do not allow. Use a first-order optimizer such as AdamW."
        )


def check_finite(module: nn.Module) -> None:
    """See that training starts from finite parameters.

    Raises:
        ModelError: a parameter holds a NaN or an infinity; it is named.
    """
    for name, parameter in module.named_parameters():
        held = local(parameter.detach())
        if held.is_floating_point() and not bool(torch.isfinite(held).all()):
            bad = int((~torch.isfinite(held)).sum())
            raise ModelError(
                f"Parameter `{name}` has {bad} of {held.numel()} values that are not finite before the first update. "
                "Was the checkpoint damaged, or the initialisation skipped (`torch.empty`, `to_empty`)?"
            )


def check_settings(*, accumulate: Any, clip_norm: Any, clip_value: Any, max_skips: Any) -> None:
    """See that the numbers make sense.

    Raises:
        ConfigError: one of them does not.
    """
    if not _counts(accumulate):
        raise ConfigError(f"`accumulate` is {accumulate!r}; it is the number of micro-batches in an update: 1 or more.")
    for name, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            raise ConfigError(f"`{name}` is {value!r}; give a number above 0, or None for no clipping.")
    if clip_norm is not None and clip_value is not None:
        raise ConfigError(f"`clip_norm` is {clip_norm} and `clip_value` is {clip_value}; give one of the two.")
    if not _counts(max_skips):
        raise ConfigError(
            f"`max_skips` is {max_skips!r}; it is the number of skipped updates in a row that stops a run: 1 or more."
        )


def check_micro_batches(given: Any) -> None:
    """See that a window was given, and not a batch that would be taken apart by iterating over it.

    Raises:
        DataError: it is a tensor or a mapping.
    """
    if isinstance(given, (torch.Tensor, Mapping)):
        raise DataError(
            f"`update` was given one {type(given).__name__}; it takes the micro-batches of a window: `engine.update([batch])`."
        )


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_average(ema: Any, module: nn.Module) -> None:
    """Raise a `ModelError` where torch's own average over all weights at once would meet two number formats."""
    averages_at_once = getattr(getattr(ema, "multi_avg_fn", None), "__module__", None) == "torch.optim.swa_utils"
    if averages_at_once and {p.dtype for p in ema.module.parameters()} != {p.dtype for p in module.parameters()}:
        raise ModelError(
            "`ema` was made before the weights became BF16, and its `multi_avg_fn` takes one number format. Give "
            "`AveragedModel` an `avg_fn`, as `get_ema_avg_fn(decay)`: the average then stays FP32, in which it loses nothing."
        )
