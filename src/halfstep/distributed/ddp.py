"""Wrapping a module in DistributedDataParallel, and what lies under wrappers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.config.choice import Choice
from halfstep.distributed.group import Group


def wrap(module: nn.Module, group: Group, device: torch.device, *, late: bool) -> tuple[nn.Module, Choice[str]]:
    """The model to call on several ranks, and when its gradients are reduced.

    Buffers are not broadcast before each forward, so that a rank without data is not waited for; give rank 0's to all before
    evaluation and saving (`Group.broadcast_buffers`).

    Args:
        module: the user's model, or DDP's wrapper of it.
        late: leave the model as it is; gradients are reduced after the last backward.
    """
    if group.alone:
        return module, Choice(value="none", reason="one process")
    if late:
        group.equalise(module)
        return module, Choice(value="after the last backward", reason="parameters may be unused in some micro-batches")
    choice = Choice(value="during the last backward", reason="once a window, overlapped with backward by DDP")
    if isinstance(module, DistributedDataParallel):
        return module, choice
    devices = None if device.type in ("cpu", "mps") else [device]
    return DistributedDataParallel(module, device_ids=devices, broadcast_buffers=False, gradient_as_bucket_view=True), choice


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
    if isinstance(model, DistributedDataParallel):
        return cast(AbstractContextManager[None], model.no_sync())
    return nullcontext()
