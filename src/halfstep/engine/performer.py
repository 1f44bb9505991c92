"""One window, from its micro-batches to its update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from halfstep.config.choice import Choice
from halfstep.distributed import Group
from halfstep.engine.accumulation import Accumulated, Accumulation
from halfstep.engine.arithmetic import Arithmetic
from halfstep.engine.finish import Finish, Outcome
from halfstep.engine.loss import LossFunction, check_total
from halfstep.engine.reading import Feed
from halfstep.engine.settlement import Made, Settlement
from halfstep.engine.sharded import ShardedAccumulation
from halfstep.engine.update import Number, Update
from halfstep.engine.window import Reference, Window
from halfstep.errors import ModelError


@dataclass(slots=True, kw_only=True)
class Performer:
    """The parts that an update passes through, in the order of their fields.

    Attributes:
        loss: the user's loss function; None where only open windows are used.
        arithmetic: precision and loss scale.
        accumulation: forwards and backwards.
        finish: norm, clipping and step.
        settlement: ledger, scheduler, EMA and counters.
        reference: the expected weight of a micro-batch.
        group: all ranks.
        updates_begun: updates made, applied or not.
    """

    loss: LossFunction | None
    arithmetic: Arithmetic
    accumulation: Accumulation | ShardedAccumulation
    finish: Finish
    settlement: Settlement
    reference: Reference
    group: Group
    updates_begun: int = 0

    @property
    def choices(self) -> dict[str, Choice[Any]]:
        """What was decided about precision, micro-batches and step, with reasons."""
        made: dict[str, Choice[Any]] = {"finish": self.finish.choice, "micro_batch_parts": self.accumulation.choice}
        return {**self.arithmetic.choices, **made}

    def perform(self, feed: Feed, *, everyone: bool) -> Update:
        """Make an update of a feed of micro-batches; `everyone` tells whether no rank's feed is empty."""
        if self.loss is None:
            raise ModelError("The engine has no loss function: give it `loss=`, or call backward yourself in `engine.window()`.")
        feed = self._begin(feed)
        self.finish.clear()
        return self._end(self.accumulation.run(feed, everyone=everyone, new_window=self._new_window, clear=self.finish.clear))

    def has_applied(self, num_updates: int | None) -> bool:
        """Whether so many updates have been applied; the open one is settled where that decides it."""
        if num_updates is None or self.settlement.ledger.applied + self.settlement.pending < num_updates:
            return False
        self.settlement.settle()
        return self.settlement.ledger.applied >= num_updates

    @contextmanager
    def open_window(self) -> Iterator[Window]:
        """Make an update of the backwards that the caller runs in the `with` block; of none after an error."""
        self.arithmetic.begin(None, None)
        self.finish.clear()
        window = self._new_window()
        try:
            with self.accumulation.quiet(), window:
                yield window
        except BaseException:
            self.finish.clear()
            raise
        with self.group.failures_told():
            window.start_sums()
            window.ended_in(self._end(self.accumulation.by_caller(window)))

    def _begin(self, feed: Feed) -> Feed:
        """Decide the precision on the first micro-batch, if it is still open."""
        if self.arithmetic.decided:
            return feed
        first = next(feed, None)
        self.arithmetic.begin(self.loss, None if first is None else first[0])
        return feed if first is None else chain([first], feed)

    def _new_window(self) -> Window:
        return Window(
            autocast=self.arithmetic.autocast,
            reference=self.reference,
            scaler=self.arithmetic.scaler,
            group=self.group,
            device=self.finish.device,
        )

    def _end(self, done: Accumulated) -> Update:
        """Reduce what DDP has not, let the update before move the scheduler, then step."""
        if not done.averaged:
            self.group.sum_gradients(self.finish.parameters)
        self.settlement.settle()
        self.settlement.count(done.window)
        self.updates_begun += 1
        lr, on_host = self.finish.lr, self.finish.on_host
        scale = float(done.window.scale) if on_host else done.window.scale
        loss_sum, weight = done.window.totals(on_host=on_host)
        outcome = self._step(weight, scale, averaged=done.averaged)
        update = Update(
            index=self.updates_begun,
            micro_batches=done.window.micro_batches,
            lr=lr,
            loss=_mean(loss_sum, weight),
            grad_norm=outcome.grad_norm,
            scale=scale,
            weight=weight,
            settle=self.settlement.look,
        )
        own_loss, scaler = done.window.loss_sum, self.arithmetic.scaler
        self.settlement.take(Made(update=update, batches=done.batches, own_loss=own_loss, scaler=scaler), outcome, weight)
        return update

    def _step(self, weight: Number, scale: Number, *, averaged: bool) -> Outcome:
        if not isinstance(weight, torch.Tensor):
            check_total(weight)
            if weight == 0:
                self.finish.clear()
                return Outcome(grad_norm=float("nan"), skipped=True)
        ranks = self.group.size if averaged else 1
        outcome = self.finish(ranks * (self.reference.value or 1.0) / (weight * scale))
        if self.arithmetic.scaler is not None:
            self.arithmetic.scaler.update(outcome.skipped, weight)
        return outcome


def _mean(total: Number, weight: Number) -> Number:
    if isinstance(weight, torch.Tensor):
        return total / weight
    return total / weight if weight else float("nan")
