"""Wrapping a module in DistributedDataParallel, and what lies under wrappers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.config.choice import Choice
from halfstep.distributed.group import Group, lend
from halfstep.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A model on this rank, equal on all of them, whose gradients are reduced over the ranks once a window.

    Attributes:
        model: what to call: the user's model, or its DDP wrapper.
        averaging: the DDP wrapper that averages gradients in a backward inside `with_sync`, bucket by bucket; None where they are
            summed after the last backward, when it is known which parameters have any. One that was made here averages nowhere
            else, so that the caller may run the model as they like, on one rank or in the window of another engine.
        choice: when gradients are reduced, and why then.
    """

    model: nn.Module
    averaging: DistributedDataParallel | None
    choice: Choice[str]


def replicate(model: nn.Module, group: Group, device: torch.device, *, late_because: str | None = None) -> Replica:
    """Make the model equal on all ranks, and wrap it in DDP; every rank calls it.

    Buffers are not broadcast before each forward, so that a rank without data is not waited for; give rank 0's to all before
    evaluation and saving (`Group.broadcast_buffers`).

    Args:
        model: the user's model, or DDP's wrapper of it, compiled or not.
        group: all ranks.
        device: where the model is.
        late_because: why gradients cannot be reduced during backward; None where they can.

    Raises:
        ModelError: the user's DDP wrapper cannot be used with uneven ranks.
    """
    if group.alone:
        return Replica(model=model, averaging=None, choice=Choice(value="not at all", reason="one process"))
    ddp = ddp_in(model)
    if ddp is not None:
        _check(ddp, group)
        if ddp.find_unused_parameters:
            late_because = late_because or "the DDP wrapper that was given looks for unused parameters"
    if late_because is not None:
        group.equalise(unwrap(model))
        return Replica(model=model, averaging=None, choice=Choice(value="after the last backward", reason=late_because))
    if ddp is None:
        group.broadcast_buffers(unwrap(model))
        model = ddp = _wrapped(model, device)
        lend(ddp)
    choice = Choice(value="during the last backward", reason="once a window, overlapped with backward by DDP")
    return Replica(model=model, averaging=ddp, choice=choice)


def _wrapped(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    settings: dict[str, Any] = {"device_ids": None if device.type == "cpu" else [device], "gradient_as_bucket_view": True}
    known = inspect.signature(DistributedDataParallel).parameters
    renamed = "forward_sync_buffers" in known  # in torch 2.13, where the old name warns
    settings["forward_sync_buffers" if renamed else "broadcast_buffers"] = False
    wrapper = DistributedDataParallel(model, **settings)
    wrapper.require_backward_grad_sync = False
    return wrapper


def _check(ddp: DistributedDataParallel, group: Group) -> None:
    cure = "Give the engine the model itself, which it wraps"
    if ddp.process_group.size() != group.size:
        raise ModelError(f"The DDP wrapper averages over {ddp.process_group.size()} ranks, and the run has {group.size}. {cure}.")
    if ddp.static_graph:
        raise ModelError(f"The DDP wrapper has a static graph, with which a rank without data would hang the others. {cure}.")
    if ddp.broadcast_buffers and any(True for _ in ddp.module.buffers()):
        raise ModelError(
            "The DDP wrapper broadcasts buffers before each forward, and would wait for ever for a rank without data. "
            f"{cure}, or tell DDP not to (`broadcast_buffers=False`)."
        )


def ddp_in(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper that is the model, or that was compiled into it."""
    while not isinstance(model, DistributedDataParallel):
        if not hasattr(model, "_orig_mod"):
            return None
        model = cast(nn.Module, model._orig_mod)
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module under DDP and `torch.compile`."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = cast(nn.Module, model.module)
        elif hasattr(model, "_orig_mod"):
            model = cast(nn.Module, model._orig_mod)
        else:
            return model


def without_sync(model: nn.Module) -> AbstractContextManager[None]:
    """A context around forward and backward in which gradients stay on their rank."""
    ddp = ddp_in(model)
    return nullcontext() if ddp is None else cast(AbstractContextManager[None], ddp.no_sync())


@contextmanager
def with_sync(ddp: DistributedDataParallel) -> Iterator[None]:
    """A context around forward and backward in which DDP averages the gradients."""
    before, ddp.require_backward_grad_sync = ddp.require_backward_grad_sync, True
    try:
        yield
    finally:
        ddp.require_backward_grad_sync = before


def conclude_reduction(ddp: DistributedDataParallel) -> None:
    """See that DDP has reduced all gradients, after a backward in which it should have; every rank calls it.

    After the first such backward DDP sorts its buckets anew, with a broadcast, in the next forward: which a rank without data
    would not run. This makes it do so now; it is the call that DDP's forward begins with, and is free afterwards.

    Raises:
        ModelError: some parameters had no gradient in that backward, so that DDP still waits for them.
    """
    try:
        ddp.reducer._rebuild_buckets()
    except RuntimeError as error:
        if "finished reduction in the prior iteration" not in str(error):
            raise
        raise ModelError(_unfinished(ddp, str(error))) from None


def _unfinished(ddp: DistributedDataParallel, told: str) -> str:
    """The sentence for what DDP says in a page; it numbers the trainable parameters."""
    indices = re.search(r"did not receive grad for rank (\d+): ([\d ]+)", told)
    names = [name for name, parameter in ddp.module.named_parameters() if parameter.requires_grad]
    missing = [f"`{names[int(i)]}`" for i in indices[2].split()] if indices else []
    which = f"{', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}" if missing else "Some parameters"
    rank = f" on rank {indices[1]}" if indices else ""
    return (
        f"{which} took no part in the last micro-batch of a window{rank}, so that the gradients could not be reduced during its "
        "backward. Give the engine `find_unused_parameters=True`, or freeze what is not trained."
    )
