"""Forwards and backwards of one window; done again in smaller micro-batches where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from halfstep.config.choice import Choice
from halfstep.distributed import Group
from halfstep.distributed.ddp import without_sync
from halfstep.engine.batch import num_samples, to_device
from halfstep.engine.halving import is_out_of_memory, next_parts, parts_of
from halfstep.engine.loss import LossFunction, sum_and_weight
from halfstep.engine.reading import Feed
from halfstep.engine.window import Window
from halfstep.errors import DeviceError

PROBING_WINDOWS = 2
"""On several ranks the first windows reduce gradients late, so that ranks can agree to halve before any reduction begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """The gradients of a window, and what they came from.

    Attributes:
        window: its sums.
        batches: this rank's micro-batches as the loader gave them.
        averaged: whether DDP has averaged the gradients over the ranks; else they are this rank's own.
    """

    window: Window
    batches: Sequence[Any]
    averaged: bool


class Accumulation:
    """Runs the micro-batches of windows.

    Args:
        model: the model to call, wrapped in DDP where there are several ranks.
        loss: the user's loss function.
        group: all ranks.
        device: where micro-batches are moved to.
        halve: whether micro-batches are halved when memory runs out.
    """

    def __init__(self, model: nn.Module, loss: LossFunction | None, group: Group, device: torch.device, *, halve: bool) -> None:
        self._model, self._loss, self._group, self._device = model, loss, group, device
        self._halve = halve
        self._windows_done = 0
        self.parts = 1
        """In how many parts each micro-batch of the loader is computed."""

    @property
    def choice(self) -> Choice[int]:
        """In how many parts micro-batches are computed, and why."""
        if self.parts == 1:
            return Choice(value=1, reason="micro-batches fit as the loader gives them")
        return Choice(value=self.parts, reason="memory ran out with larger micro-batches; the weights keep the result the same")

    def run(self, feed: Feed, *, everyone: bool, new_window: Callable[[], Window], clear: Callable[[], None]) -> Accumulated:
        """Compute a window.

        Args:
            feed: this rank's micro-batches; may be empty where another rank has some.
            everyone: whether every rank has at least one.
            new_window: makes an empty window.
            clear: drops all gradients.

        Raises:
            DeviceError: memory ran out and nothing smaller can be tried.
        """
        kept: list[tuple[Any, bool]] = []
        probing = self._halve and not self._group.alone and self._windows_done < PROBING_WINDOWS
        averaged = everyone and not probing and not self._group.alone
        micro_batches: Feed = _keeping(feed, kept)
        while True:
            window = new_window()
            if not self._ran_out(window, micro_batches, averaged=averaged, probing=probing):
                break
            clear()
            self.parts = next_parts([batch for batch, _ in kept], self.parts)
            micro_batches = chain(list(kept), _keeping(feed, kept))
        self._windows_done += 1
        return Accumulated(window=window, batches=[batch for batch, _ in kept], averaged=averaged)

    def _ran_out(self, window: Window, micro_batches: Feed, *, averaged: bool, probing: bool) -> bool:
        """Whether memory ran out on any rank that takes part in the decision."""
        ran_out = self._attempt(window, micro_batches, averaged=averaged)
        if ran_out and not self._may_halve(probing):
            raise DeviceError(self._out_of_memory())
        window.start_sums()
        return self._group.max(float(ran_out))[0] > 0 if probing else ran_out

    def _attempt(self, window: Window, micro_batches: Feed, *, averaged: bool) -> bool:
        try:
            with window.open():
                for batch, last in micro_batches:
                    self._micro_batch(window, batch, last=last, averaged=averaged)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if not self._halve:
                raise DeviceError(self._out_of_memory()) from error
        else:
            return False
        for _ in micro_batches:
            pass
        _give_memory_back(self._device)
        return True

    def _micro_batch(self, window: Window, batch: Any, *, last: bool, averaged: bool) -> None:
        loss = self._loss
        assert loss is not None
        window.samples += num_samples(batch)
        parts = parts_of(batch, self.parts)
        for number, (part, share) in enumerate(parts, 1):
            final = last and number == len(parts)
            with self._sync(final and averaged):
                with window.forward():
                    result = loss(self._model, to_device(part, self._device))
                total, weight = sum_and_weight(result, share)
                window.add(total, weight)
                if final:
                    window.start_sums()
                window.run_backward(total)

    def _sync(self, wanted: bool) -> AbstractContextManager[None]:
        return nullcontext() if wanted or self._group.alone else without_sync(self._model)

    def _may_halve(self, probing: bool) -> bool:
        return self._halve and (probing or self._group.alone)

    def _out_of_memory(self) -> str:
        if self._group.alone or not self._halve:
            return "Out of memory in a micro-batch, and `halve_on_out_of_memory` is off. Use smaller micro-batches."
        return (
            f"Out of memory on rank {self._group.rank} after the first {PROBING_WINDOWS} updates, when ranks can no longer agree "
            "to halve. Use smaller micro-batches, or put the longest samples first so that the first updates find the size."
        )


def _keeping(feed: Feed, kept: list[tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
    for item in feed:
        kept.append(item)
        yield item


def _give_memory_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
