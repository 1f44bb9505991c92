"""The log of a run: JSON Lines, and TensorBoard events."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halfstep.train.disk import to_json, write_text, writing
from halfstep.train.record import EvaluationRecord, UpdateRecord


class JsonLines:
    """A file with one JSON object a line, readable while the run goes.

    Args:
        path: the file; it is created, and must not exist unless the run goes on.
        after: the update that the run goes on from: what the file says of later ones, which are made again, is taken out.
    """

    def __init__(self, path: Path, *, after: int | None = None) -> None:
        self._path = path
        with writing(path):
            if after is not None:
                cut_off(path, after)
            self._file = path.open("x" if after is None else "a", encoding="utf-8", buffering=1)

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


def cut_off(path: Path, after: int) -> None:
    """Take out of a log what it says of updates after this one, and a line that was not finished."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    write_text(path, "".join(line for line in lines if line.endswith("\n") and _update_of(line) <= after))


def _update_of(line: str) -> int:
    values = json.loads(line)
    return int(values["update"] if values.get("kind") == "evaluation" else values["index"])


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
        after: the update that the run goes on from: later points of an earlier file are not shown.
    """

    def __init__(self, folder: Path, *, after: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        with writing(folder):
            self._writer = SummaryWriter(str(folder), purge_step=None if after is None else after + 1)

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
