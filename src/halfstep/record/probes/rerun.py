"""A forward that the script made, kept so that it can be made once more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.engine.batch import tensors
from halfstep.events.vocabulary import Place
from halfstep.precision.untouched import RandomState, untouched

RERUNNING: ContextVar[bool] = ContextVar("halfstep_rerunning", default=False)
"""True while a probe makes a forward once more: what happens then is no part of the loop, and no hook may count it."""


@contextmanager
def apart() -> Iterator[None]:
    """What a probe does inside is no part of the loop."""
    token = RERUNNING.set(True)
    try:
        yield
    finally:
        RERUNNING.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Casting:
    """The autocast region around a forward."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @staticmethod
    def now(device_type: str) -> Casting:
        """What holds now."""
        return Casting(
            device_type=device_type,
            enabled=torch.is_autocast_enabled(device_type),
            dtype=torch.get_autocast_dtype(device_type),
            cache=torch.is_autocast_cache_enabled(),
        )

    def again(self) -> torch.autocast:
        """The same region once more."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache)


@dataclass(slots=True, kw_only=True)
class Call:
    """One forward of the model under gradients.

    Attributes:
        args: what the model was given by position.
        kwargs: what it was given by name.
        rng: the random states before it.
        casting: the autocast region around it.
        place: the line of the script that called the model.
        sample_ids: the samples of the batch, where the loader told.
        loss_is_finite: whether the loss that backward began from was finite; None where that was not heard.
        infinity_is_bad: whether infinity in an output is known to be a fault, which it need not be.
        output_gradients: what backward brought to each output, by the output's name.
        versions: how often each input had been written when the forward ran.
        dropped: why there are no output gradients, where they were too large to keep.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rng: RandomState
    casting: Casting
    place: Place | None = None
    sample_ids: Sequence[int] | None = None
    loss_is_finite: bool | None = None
    infinity_is_bad: bool = False
    output_gradients: dict[str, Tensor] = field(default_factory=dict)
    versions: tuple[int, ...] = ()
    dropped: str = ""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Every tensor that went in, by the expression that reaches it."""
        return dict((*tensors(self.args, "args"), *tensors(self.kwargs, "kwargs")))

    @property
    def changed(self) -> bool:
        """Whether the script has written over an input since."""
        return self.versions != versions(self.args, self.kwargs)


def versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """How often each input was written until now; an inference tensor counts nothing and is never written under gradients."""
    return tuple(0 if t.is_inference() else t._version for given in (args, kwargs) if given for _, t in tensors(given))


def inner(model: nn.Module) -> nn.Module:
    """The module that DDP wraps, or the model itself: what one rank can run alone."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def floating(nested: Any, path: str) -> dict[str, Tensor]:
    """Every floating tensor in it by the expression that reaches it."""
    return {name: tensor for name, tensor in tensors(nested, path) if tensor.is_floating_point()}


@contextmanager
def again(model: nn.Module, call: Call, device: torch.device) -> Iterator[nn.Module]:
    """The state of the model as it was before `call`, its random states and autocast region; all put back afterwards.

    Yields the module whose `forward` is to be called. Parameters are what they are now, and stay so.
    """
    module = inner(model)
    with apart(), untouched(module, device), torch.enable_grad(), call.casting.again():
        call.rng.restore()
        yield module
