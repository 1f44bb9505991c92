"""What follows from an update once it is known whether it was applied: ledger, scheduler, EMA, counters, and stopping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from halfstep.engine.diagnose import cause_of_skip
from halfstep.engine.finish import Outcome
from halfstep.engine.ledger import Cause, Ledger
from halfstep.engine.loss import check_total
from halfstep.engine.stopping import Stop
from halfstep.engine.update import Number, Update, as_scalar
from halfstep.engine.window import Window
from halfstep.errors import HalfstepError
from halfstep.precision.scaler import LossScaler


class Scheduler(Protocol):
    """Anything that is stepped once an applied update."""

    def step(self) -> object:
        """Move on by one update."""


class Averaged(Protocol):
    """An average of the weights, such as `torch.optim.swa_utils.AveragedModel`."""

    def update_parameters(self, model: nn.Module) -> object:
        """Take the model's present weights into the average."""


@dataclass(slots=True, kw_only=True)
class Counters:
    """What a run has used up.

    Attributes:
        weight: tokens or samples that counted in applied updates, over all ranks.
        micro_batches: micro-batches computed by this rank, in applied and skipped updates.
        samples: samples read by this rank, likewise.
    """

    weight: float = 0.0
    micro_batches: int = 0
    samples: int = 0


class Verdict:
    """Skip flag and weight of an update on their way from the device to the host; nobody waits for them before they are read.

    They travel together, for reading the weight by itself would wait for all that the device has been given since.
    """

    __slots__ = ("_arrived", "_pair")

    def __init__(self, skipped: torch.Tensor, weight: Number) -> None:
        self._pair = torch.stack([skipped, as_scalar(weight, skipped.device)])
        self._arrived: torch.cuda.Event | None = None
        if self._pair.is_cuda:
            self._pair = torch.empty(2, pin_memory=True).copy_(self._pair, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> tuple[bool, float]:
        """Whether the update was skipped, and its weight."""
        if self._arrived is not None:
            self._arrived.synchronize()
        skipped, weight = self._pair.tolist()
        return bool(skipped), weight


@dataclass(slots=True, kw_only=True)
class Made:
    """An update that was made, and what may tell why it was skipped.

    Attributes:
        update: what its caller sees.
        batches: this rank's micro-batches.
        own_loss: the sum of this rank's losses.
        scaler: the loss scale; None without one.
    """

    update: Update
    batches: Sequence[Any]
    own_loss: Number
    scaler: LossScaler | None


@dataclass(slots=True, kw_only=True)
class Settlement:
    """Settles updates, in order; on devices where reading waits, one update late.

    Attributes:
        module: the model without wrappers.
        schedulers: stepped once an applied update.
        ema: averaged weights, moved once an applied update.
        max_skips: so many skipped updates in a row stop a run without a loss scale.
        stop: makes the error that ends the run, from the entry and the micro-batches.
    """

    module: nn.Module
    schedulers: Sequence[Scheduler]
    ema: Averaged | None
    max_skips: int
    stop: Stop
    ledger: Ledger = field(default_factory=Ledger)
    counters: Counters = field(default_factory=Counters)
    _open: tuple[Made, Verdict] | None = None
    _stopped: HalfstepError | None = None

    @property
    def pending(self) -> int:
        """Number of updates that are not settled yet: 0 or 1."""
        return int(self._open is not None)

    def count(self, window: Window) -> None:
        """Count what a window computed."""
        self.counters.micro_batches += window.micro_batches
        self.counters.samples += window.samples

    def take(self, made: Made, outcome: Outcome, weight: Number) -> None:
        """Take over an update that was made; it is settled at once where its flag is on the host."""
        if isinstance(outcome.skipped, torch.Tensor):
            self._open = made, Verdict(outcome.skipped, weight)
        else:
            self._conclude(made, outcome.skipped, made.update.weight)

    def settle(self) -> None:
        """Settle the open update, if there is one; every rank calls it, at the same place.

        Raises:
            RunStopped: its skip was one too many.
        """
        self.look()
        if self._stopped is not None:
            stopped, self._stopped = self._stopped, None
            raise stopped

    def look(self) -> None:
        """Settle the open update, if there is one, as any rank may at any time: what stops the run waits for all to settle."""
        if self._open is None:
            return
        (made, verdict), self._open = self._open, None
        skipped, weight = verdict.read()
        try:
            self._conclude(made, skipped, weight)
        except HalfstepError as error:
            self._stopped = error

    def _conclude(self, made: Made, skipped: bool, weight: float) -> None:
        if skipped:
            self._skipped(made, weight)
        else:
            self._applied(made.update, weight)

    def _applied(self, update: Update, weight: float) -> None:
        check_total(weight)
        update.settled(weight)
        self.ledger.record(update)
        self.counters.weight += weight
        for scheduler in self.schedulers:
            scheduler.step()
        if self.ema is not None:
            self.ema.update_parameters(self.module)

    def _skipped(self, made: Made, weight: float) -> None:
        update, scaled, calibrating = made.update, made.scaler is not None, self.ledger.applied == 0
        cause, detail = cause_of_skip(
            self.module, made.batches, update, own_loss=float(made.own_loss), scaled=scaled, calibrating=calibrating
        )
        update.settled(weight, cause, detail)
        self.ledger.record(update)
        if self._is_one_too_many(cause, made.scaler):
            raise self.stop(update.entry, made.batches, skipped_in_a_row=self.ledger.skipped_in_a_row)

    def _is_one_too_many(self, cause: Cause, scaler: LossScaler | None) -> bool:
        """The scale's floor judges what a lower scale may cure; the count judges everything else."""
        if scaler is None or cause is Cause.NO_WEIGHT:
            return self.ledger.skipped_in_a_row >= self.max_skips
        return scaler.below_floor


def per_update(schedulers: Sequence[Any]) -> list[Scheduler]:
    """The schedulers that move once an update."""
    return [one for one in schedulers if not isinstance(one, ReduceLROnPlateau)]


def on_plateau(schedulers: Sequence[Any]) -> list[ReduceLROnPlateau]:
    """The schedulers that wait for a metric."""
    return [one for one in schedulers if isinstance(one, ReduceLROnPlateau)]


def listed(scheduler: Scheduler | Sequence[Scheduler] | None) -> list[Any]:
    """None, one or several schedulers as a list."""
    if scheduler is None:
        return []
    return list(scheduler) if isinstance(scheduler, Sequence) else [scheduler]
