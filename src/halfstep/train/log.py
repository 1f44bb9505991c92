"""The log of a run: JSON Lines, and TensorBoard events."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halfstep.train.disk import writing
from halfstep.train.record import EvaluationRecord, UpdateRecord


class JsonLines:
    """A file with one JSON object a line, readable while the run goes.

    Args:
        path: the file; it is created, and must not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file = path.open("x", encoding="utf-8", buffering=1)

    def on_update(self, record: UpdateRecord) -> None:
        """Write the update as a line of kind "update"."""
        self.write("update", {**asdict(record), "tokens_per_s": round(record.tokens_per_s, 1)})

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Write the evaluation as a line of kind "evaluation"."""
        self.write("evaluation", asdict(record))

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """Write one line."""
        with writing(self._path):
            self._file.write(json.dumps({"kind": kind, **values}) + "\n")

    def close(self) -> None:
        """Close the file."""
        with writing(self._path):
            self._file.close()


class TensorBoard:
    """Scalars as TensorBoard events.

    Args:
        folder: where the event file goes.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        with writing(folder):
            self._writer = SummaryWriter(str(folder))

    def on_update(self, record: UpdateRecord) -> None:
        """Add the update's loss, norm, learning rate, rate and scale."""
        self._add("train/loss", record.loss, record.update)
        self._add("train/grad_norm", record.grad_norm, record.update)
        self._add("train/learning_rate", record.lr, record.update)
        self._add("speed/tokens_per_s", record.tokens_per_s, record.update)
        if record.scale is not None:
            self._add("train/loss_scale", record.scale, record.update)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Add the evaluation's loss and perplexity."""
        self._add("evaluation/loss", record.loss, record.update)
        self._add("evaluation/nats_per_byte", record.nats_per_byte, record.update)
        self._add("evaluation/perplexity", record.perplexity, record.update)

    def _add(self, name: str, value: float, update: int) -> None:
        with writing(self._folder):
            self._writer.add_scalar(name, value, update)

    def close(self) -> None:
        """Write what is left and close the file."""
        with writing(self._folder):
            self._writer.close()
