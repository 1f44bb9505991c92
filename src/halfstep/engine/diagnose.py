"""Why an update was skipped, and what is kept of the one that stopped a run."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.engine.batch import first_non_finite
from halfstep.engine.ledger import Cause
from halfstep.engine.update import Update
from halfstep.precision.policy import largest_magnitude


def cause_of_skip(
    module: nn.Module, batches: Sequence[Any], update: Update, *, own_loss: float, scaled: bool, calibrating: bool
) -> tuple[Cause, str]:
    """The cause of a skipped update and where it was found, from most to least certain.

    Args:
        module: the model, with the parameters that the update left alone.
        batches: this rank's micro-batches of the window.
        update: what was skipped, with its global loss and weight.
        own_loss: the sum of this rank's losses.
        scaled: whether the loss was scaled.
        calibrating: whether no update has been applied yet.
    """
    if update.weight == 0:
        return Cause.NO_WEIGHT, "every label of the window is masked" if update.micro_batches else "the window has no backward"
    for number, batch in enumerate(batches, 1):
        if found := first_non_finite(batch):
            return Cause.DATA, f"{found} of micro-batch {number}"
    name, largest = largest_magnitude(module.named_parameters())
    if not math.isfinite(largest):
        return Cause.WEIGHTS, f"`{name}`"
    if not math.isfinite(update.loss):
        elsewhere = math.isfinite(own_loss) and math.isfinite(update.weight)
        return Cause.LOSS, f"the loss is {update.loss}{', for what another rank was given' if elsewhere else ''}"
    return (Cause.CALIBRATION if scaled and calibrating else Cause.OVERFLOW), ""


_CANNOT_BE_SAVED = (OSError, RuntimeError, pickle.PicklingError, AttributeError, TypeError)
"""What `torch.save` raises for a full disk, and for batches that hold lambdas, locks or objects of local classes."""


def save_evidence(folder: Path, name: str, content: dict[str, Any]) -> str:
    """Save what is needed to run a bad update again; where it was saved, or why it could not be, in words."""
    path = folder / f"{name}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
    except _CANNOT_BE_SAVED as error:
        with suppress(OSError):
            path.unlink()
        return f"the batch could not be saved ({error})"
    return f"the batch was saved as {path}"
