"""The sentence with which a run is stopped: what happened, where it began, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.distributed.shards import is_sharded
from halfstep.engine.arithmetic import Arithmetic
from halfstep.engine.diagnose import save_evidence
from halfstep.engine.ledger import Cause, Entry
from halfstep.engine.loss import LossFunction
from halfstep.engine.origin import first_non_finite_module
from halfstep.engine.window import Reference
from halfstep.errors import DataError, HalfstepError, ScaleFloorReached, TooManySkips
from halfstep.precision.policy import largest_magnitude

_ADVICE = {
    Cause.DATA: "Mend or leave out that sample.",
    Cause.WEIGHTS: "The weights are lost: start from the last good checkpoint, with a lower learning rate or clipping.",
    Cause.LOSS: "Look at that module's arithmetic (log or division by zero, a mask constant out of range).",
    Cause.OVERFLOW: "Lower the learning rate, clip the norm, or train in bf16 or fp32.",
    Cause.CALIBRATION: "No scale makes the gradients finite: train in bf16 or fp32, or mend that module.",
}


def all_masked(num_updates: int) -> DataError:
    """The error after so many updates in a row in which nothing counted."""
    return DataError(
        f"Every label was masked in {_in_a_row(num_updates)}, so nothing could be learnt. "
        "Look at the ignore index, the truncation length and the prompt mask."
    )


@dataclass(frozen=True, slots=True)
class Stop:
    """Makes the error that ends a run.

    Attributes:
        module: the model without wrappers.
        loss: the user's loss function, to run the batch again; None where there is none.
        arithmetic: the precision it ran in.
        reference: the weight that backward's loss was divided by.
        device: where the model is.
        evidence: folder in which the batch is saved, to be run again.
        rank: number of this process.
    """

    module: nn.Module
    loss: LossFunction | None
    arithmetic: Arithmetic
    reference: Reference
    device: torch.device
    evidence: Path
    rank: int

    def __call__(self, entry: Entry, batches: Sequence[Any], *, skipped_in_a_row: int) -> HalfstepError:
        """The error after the update of `entry`, which was one skip too many."""
        if entry.cause is Cause.NO_WEIGHT:
            return all_masked(skipped_in_a_row)
        assert entry.cause is not None
        found = f"{entry.cause}: {entry.detail}" if entry.detail else str(entry.cause)
        facts = f"{self._first(entry, batches)}; {self._largest()}; {self._saved(entry, batches)}. {_ADVICE[entry.cause]}"
        scaler = self.arithmetic.scaler
        if scaler is None:
            what = f"skipped {_in_a_row(skipped_in_a_row)}"
            return TooManySkips(f"Stopped at update {entry.index}: {what} ({found}); {facts}")
        what = f"the loss scale fell below its floor of {scaler.settings.floor:g}"
        return ScaleFloorReached(f"Stopped at update {entry.index}: {what} ({found}); {facts}")

    def _first(self, entry: Entry, batches: Sequence[Any]) -> str:
        what = "the first value that is not finite is"
        if entry.cause in (Cause.DATA, Cause.WEIGHTS):
            return f"{what} in {entry.detail}"
        if self.loss is None or not batches:
            return f"{what} unknown, since the engine has no loss function to run again"
        if is_sharded(self.module):
            return f"{what} unknown, since one rank cannot run a sharded model by itself"
        try:
            for number, batch in enumerate(batches, 1):
                if where := self._where(self.loss, batch, entry.scale):
                    return f"{what} {where}, in micro-batch {number}"
        except Exception as error:  # whatever the user's code raises must not hide why the run is stopped
            return f"{what} unknown, since running the micro-batches again failed ({type(error).__name__}: {error})"
        return "no value was found that is not finite when the micro-batches were run again"

    def _where(self, loss: LossFunction, batch: Any, scale: float) -> str | None:
        scale /= self.reference.value or 1.0
        return first_non_finite_module(self.module, loss, batch, self.arithmetic.policy, scale=scale, device=self.device)

    def _largest(self) -> str:
        name, largest = largest_magnitude(self.module.named_parameters())
        return f"the largest weight is {largest:.4g}, in `{name}`"

    def _saved(self, entry: Entry, batches: Sequence[Any]) -> str:
        precision = self.arithmetic.policy.precision.value
        content = {"entry": entry.to_dict(), "batches": list(batches), "precision": precision}
        return save_evidence(self.evidence, f"update-{entry.index}-rank-{self.rank}", content)


def _in_a_row(num_updates: int) -> str:
    return "1 update" if num_updates == 1 else f"{num_updates} updates in a row"
