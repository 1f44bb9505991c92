"""What `halfstep plan` says of the rows, and what it is told about this machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfstep.bench.describing import Subject
from halfstep.bench.row import Row
from halfstep.config.options import Attention, Sharding
from halfstep.errors import UsageError
from halfstep.measure.cache_folder import cache_dir
from halfstep.measure.calibrating import calibrate
from halfstep.plan.calibration import keep
from halfstep.plan.memory import memory_bill
from halfstep.plan.model_facts import Model, from_config
from halfstep.plan.recipe import Adapter, Checkpointing, Loss, Optimizer, Recipe

KINDS = {"optimizer": Optimizer, "attention": Attention, "loss": Loss, "adapter": Adapter}
"""Fields of a recipe whose values are closed lists."""


def predicted_bytes(subject: Subject, rows: Sequence[Row]) -> dict[str, int]:
    """Allocated bytes at the peak of each row by its name; none where the model or its data are of a kind that is not known."""
    model = _model(subject)
    length = subject.sequence if model is None or model.fixed_length is None else model.fixed_length
    if model is None or length is None:
        return {}
    return {str(row): round(memory_bill(model, recipe_of(subject, row, length)).allocated_bytes) for row in rows}


def recipe_of(subject: Subject, row: Row, length: int) -> Recipe:
    """The row as the planner has it: what the row says, and what the run says of all rows."""
    told = {name: KINDS[name](value) if name in KINDS else value for name, value in subject.recipe.items() if value is not None}
    configured = subject.conditions["activation checkpointing"] == "on"
    again = configured if row.checkpoint is None else row.checkpoint
    return Recipe(
        micro_batch=row.micro,
        sequence=length,
        accumulation=row.accumulate,
        precision=row.precision,
        ranks=row.processes,
        sharding=row.sharding or Sharding.NONE,
        checkpointing=Checkpointing.FULL if again else Checkpointing.NONE,
        compiled=row.compile,
        **told,
    )


def keep_calibration(subject: Subject) -> str:
    """Measure what this machine reaches and keep it for planning; what came of it, in words."""
    try:
        path = keep(calibrate(torch.device(subject.device)), cache_dir())
    except OSError as error:
        return f"not calibrated: the cache cannot be written ({error.strerror or error})"
    return f"kept in {path}, for `halfstep plan --gpu this`"


def _model(subject: Subject) -> Model | None:
    try:
        return from_config(subject.model_config, "the model")
    except UsageError:
        return None
