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
from halfstep.plan.model_facts import Transformer, from_config
from halfstep.plan.recipe import Checkpointing, Recipe


def predicted_bytes(subject: Subject, rows: Sequence[Row]) -> dict[str, int]:
    """Allocated bytes at the peak of each row by its name; none where the model is of a kind that is not known."""
    model = _model(subject)
    if model is None or subject.sequence is None:
        return {}
    configured = subject.conditions["activation checkpointing"] == "on"
    return {
        str(row): round(
            memory_bill(
                model,
                Recipe(
                    micro_batch=row.micro,
                    sequence=subject.sequence,
                    accumulation=row.accumulate,
                    precision=row.precision,
                    ranks=row.processes,
                    sharding=row.sharding or Sharding.NONE,
                    checkpointing=Checkpointing.FULL if _again(row, configured) else Checkpointing.NONE,
                    attention=Attention(subject.conditions["attention"]),
                    compiled=row.compile,
                ),
            ).allocated_bytes
        )
        for row in rows
    }


def _again(row: Row, configured: bool) -> bool:
    return configured if row.checkpoint is None else row.checkpoint


def keep_calibration(subject: Subject) -> str:
    """Measure what this machine reaches and keep it for planning; what came of it, in words."""
    try:
        path = keep(calibrate(torch.device(subject.device)), cache_dir())
    except OSError as error:
        return f"not calibrated: the cache cannot be written ({error.strerror or error})"
    return f"kept in {path}, for `halfstep plan --gpu this`"


def _model(subject: Subject) -> Transformer | None:
    try:
        model = from_config(subject.model_config, "the model")
    except UsageError:
        return None
    return model if isinstance(model, Transformer) else None
