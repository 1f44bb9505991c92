"""Forwards and backwards of one window; done again in smaller micro-batches where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.config.choice import Choice
from halfstep.distributed import Group
from halfstep.distributed.ddp import conclude_reduction, with_sync, without_sync
from halfstep.distributed.group import Pending
from halfstep.distributed.layout import Layout
from halfstep.engine.batch import num_samples, to_device
from halfstep.engine.halving import CURE, can_be_smaller, is_out_of_memory, next_parts, parts_of
from halfstep.engine.loss import LossFunction, sum_and_weight
from halfstep.engine.reading import Feed
from halfstep.engine.window import Window
from halfstep.errors import DeviceError

PROBING_WINDOWS = 2
"""On several ranks the first windows reduce gradients late, so that all can agree to halve before any reduction begins.

Later a rank halves alone, which the weights make right, unless its gradients are on their way to the others already.
"""

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
        layout: the model to call, and how its gradients are reduced.
        loss: the user's loss function.
        group: all ranks.
        device: where micro-batches are moved to.
        halve: whether micro-batches are halved when memory runs out.
    """

    def __init__(self, layout: Layout, loss: LossFunction | None, group: Group, device: torch.device, *, halve: bool) -> None:
        self._model, self._averaging = layout.model, layout.averaging
        self._loss, self._group, self._device = loss, group, device
        self._moves = device.type != "cpu"
        self._halve = halve
        self._windows_done = 0
        self._is_averaging = False
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
        sums: Pending | None = None
        probing = self._halve and not self._group.alone and self._windows_done < PROBING_WINDOWS
        averaged = everyone and not probing and self._averaging is not None
        while True:
            window = new_window()
            window.global_sums = sums
            if not self._runs_out(window, feed, kept, averaged=averaged, probing=probing):
                break
            sums = None if probing else window.global_sums
            clear()
            feed, kept = iter(kept), []
        if averaged and self._averaging is not None:
            conclude_reduction(self._averaging)
        self._windows_done += window.is_weighed
        return Accumulated(window=window, batches=[batch for batch, _ in kept], averaged=averaged)

    def by_caller(self, window: Window) -> Accumulated:
        """What backwards of the caller's own have left, after a block under `quiet`."""
        return Accumulated(window=window, batches=(), averaged=False)

    def quiet(self) -> AbstractContextManager[None]:
        """A context for backwards of the caller's own: gradients stay on their rank."""
        return without_sync(self._model)

    def _runs_out(self, window: Window, feed: Feed, kept: _Kept, *, averaged: bool, probing: bool) -> bool:
        """Whether memory ran out, so that the window must be computed again in smaller parts; `kept` is then the whole feed."""
        ran_out = self._attempt(window, feed, kept, averaged=averaged)
        if ran_out:
            if not self._halve or self._is_averaging:
                raise DeviceError(self._out_of_memory())
            kept.extend(feed)
            _give_memory_back(self._device)
        if probing:
            window.start_sums()
            return self._anybody_halves(kept, ran_out)
        if ran_out:
            self.parts = next_parts([batch for batch, _ in kept], self.parts)
        else:
            window.start_sums()
        return ran_out

    def _anybody_halves(self, kept: _Kept, ran_out: bool) -> bool:
        """Whether memory ran out on any rank: all go on with smaller parts, for the others are near their limit too."""
        stuck = ran_out and not can_be_smaller([batch for batch, _ in kept], self.parts)
        anybody, stuck_rank = self._group.max(float(ran_out), self._group.rank + 1.0 if stuck else 0.0)
        if stuck_rank:
            raise DeviceError(f"Out of memory on rank {stuck_rank - 1:.0f} with micro-batches of one sample. {CURE}")
        self.parts *= 2 if anybody else 1
        return bool(anybody)

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
            self._is_averaging = final and averaged
            with self._sync():
                self._pass(window, part, share, final=final)

    def _sync(self) -> AbstractContextManager[None]:
        return with_sync(self._averaging) if self._averaging is not None and self._is_averaging else without_sync(self._model)

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
        if not self._halve:
            return "Out of memory in a micro-batch, and `halve_on_out_of_memory` is off. Use smaller micro-batches."
        return (
            f"Out of memory on rank {self._group.rank} in the last micro-batch of a window, which cannot be computed again: its "
            "backward reduces the gradients with the other ranks. Use smaller micro-batches, or put the longest samples first: "
            f"in the first {PROBING_WINDOWS} updates the ranks look for a size that fits."
        )


def _give_memory_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
