"""Forwards and backwards of one window; done again in smaller micro-batches where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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

_Kept = list[tuple[Any, bool]]


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
        self._moves = device.type != "cpu"
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
        kept: _Kept = []
        probing = self._halve and not self._group.alone and self._windows_done < PROBING_WINDOWS
        averaged = everyone and not probing and not self._group.alone
        while True:
            window = new_window()
            if not self._ran_out(window, feed, kept, averaged=averaged, probing=probing):
                break
            clear()
            self.parts = next_parts([batch for batch, _ in kept], self.parts)
            feed, kept = iter(kept), []
        self._windows_done += 1
        return Accumulated(window=window, batches=[batch for batch, _ in kept], averaged=averaged)

    def _ran_out(self, window: Window, feed: Feed, kept: _Kept, *, averaged: bool, probing: bool) -> bool:
        """Whether memory ran out on any rank that takes part in the decision; `kept` then holds the whole feed."""
        ran_out = self._attempt(window, feed, kept, averaged=averaged)
        if ran_out:
            if not (self._halve and (probing or self._group.alone)):
                raise DeviceError(self._out_of_memory())
            kept.extend(feed)
            _give_memory_back(self._device)
        window.start_sums()
        return self._group.max(float(ran_out))[0] > 0 if probing else ran_out

    def _attempt(self, window: Window, feed: Feed, kept: _Kept, *, averaged: bool) -> bool:
        """Compute what the feed gives; whether memory ran out on the way."""
        try:
            with window:
                for item in feed:
                    kept.append(item)
                    batch, last = item
                    window.samples += num_samples(batch)
                    if self.parts == 1 and self._group.alone:  # the common case, kept short: small models feel every call
                        self._pass(window, batch, 1.0, final=last)
                    else:
                        self._micro_batch(window, batch, last, averaged=averaged)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return True
        return False

    def _micro_batch(self, window: Window, batch: Any, last: bool, *, averaged: bool) -> None:
        parts = parts_of(batch, self.parts)
        for number, (part, share) in enumerate(parts, 1):
            final = last and number == len(parts)
            with nullcontext() if final and averaged else without_sync(self._model):
                self._pass(window, part, share, final=final)

    def _pass(self, window: Window, part: Any, share: float, *, final: bool) -> None:
        """One forward and its backward."""
        assert self._loss is not None
        if self._moves:
            part = to_device(part, self._device)
        with window.forward():
            result = self._loss(self._model, part)
        total, weight = sum_and_weight(result, share)
        window.add(total, weight)
        if final:
            window.start_sums()
        window.run_backward(total)

    def _out_of_memory(self) -> str:
        if self._group.alone or not self._halve:
            return "Out of memory in a micro-batch, and `halve_on_out_of_memory` is off. Use smaller micro-batches."
        return (
            f"Out of memory on rank {self._group.rank} after the first {PROBING_WINDOWS} updates, when ranks can no longer agree "
            "to halve. Use smaller micro-batches, or put the longest samples first so that the first updates find the size."
        )


def _give_memory_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
