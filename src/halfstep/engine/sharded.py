"""Forwards and backwards of one window on a sharded model, which all ranks run in step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from halfstep.config.choice import Choice
from halfstep.distributed import Group
from halfstep.distributed.shards import in_step
from halfstep.engine.accumulation import Accumulated
from halfstep.engine.batch import num_samples, to_device
from halfstep.engine.halving import is_out_of_memory
from halfstep.engine.loss import LossFunction, sum_and_weight
from halfstep.engine.reading import Feed
from halfstep.engine.window import Window
from halfstep.errors import DeviceError

if TYPE_CHECKING:
    from halfstep.distributed.fsdp2 import Shards


class ShardedAccumulation:
    """Runs the micro-batches of windows where each forward and backward is one of all ranks.

    Args:
        model: the sharded model.
        shards: how it is run.
        loss: the user's loss function.
        group: all ranks.
        device: where micro-batches are moved to.
    """

    parts = 1
    choice = Choice(value=1, reason="a sharded model runs on all ranks in step, so that none can halve its micro-batches alone")

    def __init__(self, model: nn.Module, shards: Shards, loss: LossFunction | None, group: Group, device: torch.device) -> None:
        self._model, self._shards, self._loss = model, shards, loss
        self._group, self._device = group, device

    def run(self, feed: Feed, *, everyone: bool, new_window: Callable[[], Window], clear: Callable[[], None]) -> Accumulated:
        """Compute a window; its arguments and errors are those of `Accumulation.run`."""
        window, batches = new_window(), []
        try:
            with window:
                for batch, counts, last in in_step(feed, self._group, everyone=everyone):
                    self._shards.reduce(last)
                    if counts:
                        batches.append(batch)
                        window.samples += num_samples(batch)
                    self._pass(window, batch, counts=counts, last=last)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise DeviceError(self._out_of_memory()) from error
            raise
        return Accumulated(window=window, batches=batches, averaged=True)

    def by_caller(self, window: Window) -> Accumulated:
        """What backwards of the caller's own have left, after a block under `quiet`."""
        return Accumulated(window=window, batches=(), averaged=True)

    def quiet(self) -> AbstractContextManager[None]:
        """A context for backwards of the caller's own: each reduces its gradients, since any can be the last."""
        self._shards.reduce(True)
        return nullcontext()

    def _pass(self, window: Window, batch: Any, *, counts: bool, last: bool) -> None:
        assert self._loss is not None
        with window.forward():
            result = self._loss(self._model, to_device(batch, self._device))
        total, weight = sum_and_weight(result)
        if counts:
            window.add(total, weight)
        else:
            window.stand_by()
        if last:
            window.start_sums()
        if counts:
            window.run_backward(total)
        else:
            torch.autograd.backward(total, torch.zeros_like(total))

    def _out_of_memory(self) -> str:
        return (
            f"Out of memory on rank {self._group.rank} in a micro-batch of a sharded model, which cannot be computed again in "
            "halves while the other ranks wait. Use smaller micro-batches, `checkpoint_activations=True` or more ranks."
        )
