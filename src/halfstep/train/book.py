"""Keeps the count of a run and tells the listeners."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from halfstep.engine import Entry, Update
from halfstep.measure.memory import memory_use
from halfstep.train.limits import Limits
from halfstep.train.record import EvaluationRecord, Listener, UpdateRecord


class Book:
    """What a run has done so far.

    An update is read when the next one has been made: by then its values have arrived, and nobody waits for the device.

    Args:
        limits: when the run ends, for how much of it is done.
        device: whose memory is looked at.
        clock: seconds, ever growing.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._limits, self._device, self._clock = limits, device, clock
        self._listeners: Sequence[Listener] = ()
        self._began = self._last = clock()
        self._open: tuple[Update, float] | None = None
        self._lr = 0.0
        self.updates = 0
        """Updates made, skipped ones and the last one too."""
        self.applied = 0
        """Updates that moved the weights, as far as they have been read."""
        self.tokens = 0
        """Tokens that counted in them, over all ranks."""
        self.last_loss: float | None = None
        """Loss of the last update that was applied."""
        self.rates: list[float] = []
        """Tokens per second of each update."""

    def state(self) -> dict[str, Any]:
        """What is counted, as plain types; the last update is read first."""
        self.settle()
        counts = {name: getattr(self, name) for name in ("updates", "applied", "tokens", "last_loss")}
        return {**counts, "elapsed_s": self.elapsed_s}

    def resume(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave; time goes on from there."""
        self.updates, self.applied, self.tokens = state["updates"], state["applied"], state["tokens"]
        self.last_loss = state["last_loss"]
        self._last = self._clock()
        self._began = self._last - state["elapsed_s"]

    def listen(self, listeners: Sequence[Listener]) -> None:
        """Tell these from now on."""
        self._listeners = listeners

    @property
    def elapsed_s(self) -> float:
        """Wall time since the book was opened."""
        return self._clock() - self._began

    def enter(self, update: Update) -> None:
        """Note that an update was made, and read the one before."""
        seconds = self._clock() - self._last
        self.settle()
        self._open = (update, seconds)
        self.updates = update.index
        if self._limits.may_be_last(self.applied, self.tokens):
            self.settle()
        self._last = self._clock()

    def settle(self) -> None:
        """Read the last update now."""
        if self._open is None:
            return
        (update, seconds), self._open = self._open, None
        self._record(update.entry, update.lr, seconds)

    def _catch_up(self, ledger: Iterable[Entry]) -> None:
        """Read what was settled but never handed out: the skipped update that stopped a run."""
        self.settle()
        for entry in ledger:
            if entry.index > self.updates:
                self.updates = entry.index
                self._record(entry, self._lr, self._clock() - self._last)

    def _record(self, entry: Entry, lr: float, seconds: float) -> None:
        self._lr = lr
        if entry.applied:
            self.applied += 1
            self.tokens += round(entry.weight)
            self.last_loss = entry.loss
        record = UpdateRecord(
            entry=entry,
            applied=self.applied,
            done=self._limits.done(self.applied, self.tokens, self.elapsed_s),
            lr=lr,
            seconds=seconds,
            elapsed_s=self.elapsed_s,
            memory_bytes=memory_use(self._device).peak_allocated_bytes,
        )
        self.rates.append(record.tokens_per_s)
        for listener in self._listeners:
            listener.on_update(record)

    def tell(self, record: EvaluationRecord) -> None:
        """Tell the listeners of an evaluation."""
        for listener in self._listeners:
            listener.on_evaluation(record)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time spent in here belongs to no update."""
        self.settle()
        yield
        self._last = self._clock()

    def close(self, ledger: Iterable[Entry]) -> None:
        """Read what is left and tell the listeners that nothing more comes."""
        try:
            self._catch_up(ledger)
        finally:
            for listener in self._listeners:
                listener.close()
