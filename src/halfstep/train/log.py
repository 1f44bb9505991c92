"""The log of a run: JSON Lines, and TensorBoard events."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from halfstep.train.disk import to_json, writing
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
        self.write({"kind": "update", **record.to_dict()})

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Write the evaluation as a line of kind "evaluation"."""
        self.write({"kind": "evaluation", **asdict(record)})

    def write(self, values: dict[str, Any]) -> None:
        """Write one line."""
        with writing(self._path):
            self._file.write(to_json(values) + "\n")

    def close(self) -> None:
        """Close the file."""
        with writing(self._path):
            self._file.close()


class LedgerFile(JsonLines):
    """The ledger as a file: a line for each update, applied or skipped and why."""

    def on_update(self, record: UpdateRecord) -> None:
        """Write the entry."""
        self.write(record.entry.to_dict())

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """An evaluation is no update."""


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
        """Add the update's loss, norm, loss scale, learning rate and speed."""
        self._add(record.scalars(), record.entry.index)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Add the evaluation's loss, and perplexity or accuracy where it has them."""
        self._add(record.scalars(), record.update)

    def _add(self, scalars: dict[str, float], update: int) -> None:
        with writing(self._folder):
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, update)

    def close(self) -> None:
        """Write what is left and close the file."""
        with writing(self._folder):
            self._writer.close()
