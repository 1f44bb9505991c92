"""The model of a checkpoint as a plain folder of safetensors."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from halfstep.checkpoint import Checkpoints
from halfstep.config.schema import Written
from halfstep.errors import ConfigError
from halfstep.train.build import build_average
from halfstep.train.folder import save_pretrained
from halfstep.train.job import prepare
from halfstep.train.saving import Resume


def export(written: Written, to: Path, *, update: int | None) -> Path:
    """Write the model of a run's checkpoint for `from_pretrained`: the averaged weights where the run keeps any.

    Args:
        written: the run's configuration.
        to: a folder that does not exist yet.
        update: the checkpoint after this update; None for the newest.

    Returns:
        The checkpoint that it is of.

    Raises:
        UsageError: there is no such checkpoint, it is damaged, or the folder exists or cannot be written.
    """
    if to.exists():
        raise ConfigError(f"`--export`: {to} exists. Give a folder that does not exist yet.")
    job = prepare(written, started=datetime.now(), resume=Resume(update=update))
    average = build_average(job.model, job.run)
    checkpoints = Checkpoints(Path(job.run.run.folder) / "checkpoints")
    if average is None:
        found, product = checkpoints.load_weights(job.model, update), job.model
    else:
        found, product = checkpoints.load_weights(average, update, averaged=True), average.module
    save_pretrained(to, product, job.opened.kept_beside)
    return found
