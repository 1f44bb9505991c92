"""The losses of an update: those whose backward reached the model, of all that the script begins a backward from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from halfstep.record.probes.cause import LossOperation, loss_operation
from halfstep.record.probes.keeping import Keeper


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A backward that has begun: its loss, what makes it not finite, and how many output gradients the model had before."""

    loss: Tensor | float
    operation: LossOperation
    arrived: int


class Losses:
    """A loss belongs to a model when a gradient has come to one of the model's outputs: a GAN's other loss brings none.

    Where a model's outputs hold no tensor that is found, every loss counts.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._begun: Begun | None = None
        self._values: list[Tensor | float] = []
        self.operation = LossOperation()
        """What made a loss of this update not finite."""

    def begins(self, loss: Tensor) -> None:
        """A backward begins. An accelerator is not waited for; there the loss is read when the update ends."""
        self._settle()
        held, operation = loss.detach(), LossOperation()
        value: Tensor | float = held if held.numel() == 1 and held.device.type == "cpu" else held.float().sum()
        if held.device.type == "cpu":
            value = float(value)
            operation = operation if math.isfinite(value) else loss_operation(loss)
        self._begun = Begun(loss=value, operation=operation, arrived=self._keeper.arrived)

    def read(self) -> list[float]:
        """The losses of the update until now. An accelerator is waited for here, and only here."""
        self._settle()
        read = [float(value) for value in self._values]
        self._values = list(read)
        if not all(map(math.isfinite, read)) and all(call.loss_is_finite is None for call in self._keeper.calls):
            self._blame()
        return read

    def clear(self) -> None:
        """The update has ended."""
        self._values, self.operation = [], LossOperation()

    def _settle(self) -> None:
        """The backward that had begun is over: whether it reached the model is known."""
        begun, self._begun = self._begun, None
        keeper = self._keeper
        if begun is None or (keeper.hooked and keeper.arrived == begun.arrived):
            return
        self._values.append(begun.loss)
        if isinstance(begun.loss, float) and not math.isfinite(begun.loss):
            self.operation = self.operation if self.operation.name else begun.operation
            self._blame()

    def _blame(self) -> None:
        for call in self._keeper.calls[-1:]:
            call.loss_is_finite = False
