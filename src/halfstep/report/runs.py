"""Folders of `halfstep train`, read for a report: what was run, every update, every look at held-out data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import DataError

NUMBERS = ("loss", "grad_norm", "scale")
"""What every update has; where the log has none of it, it was not finite, which JSON cannot say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run.

    Attributes:
        name: the folder, as it was given.
        record: what run.json says: versions, configuration, choices, and how it ended.
        updates: every update that the log has.
        evaluations: every look at held-out data.
    """

    name: str
    record: Mapping[str, Any]
    updates: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved configuration."""
        config: Mapping[str, Any] = self.record.get("config", {})
        return config

    @property
    def summary(self) -> Mapping[str, Any]:
        """How the run ended; empty while it goes on, or where it failed."""
        return self.record.get("summary") or {}

    @property
    def unit(self) -> str:
        """What the run counts."""
        return str(self.summary.get("unit", "tokens"))


def read_run(folder: Path) -> RunRecord:
    """The run in a folder, which may still be going on.

    Raises:
        DataError: the folder holds no run, or its files are damaged.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder. Give the folder of a run, as `halfstep train` names it at its end.")
    record = _json(folder / "run.json")
    if not isinstance(record, dict) or "config" not in record:
        raise DataError(f"{folder}/run.json is not what `halfstep train` writes: it has no `config`.")
    lines = list(_lines(folder / "log.jsonl"))
    return RunRecord(
        name=str(folder),
        record=record,
        updates=[_with_numbers(line) for line in lines if line.get("kind") == "update"],
        evaluations=[line for line in lines if line.get("kind") == "evaluation"],
    )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path.parent} holds no run: there is no {path.name} in it.") from None
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}.") from None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log; a last one that is being written is left out."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            yield dict(json.loads(line))
        except ValueError:
            if number < len(lines) or text.endswith("\n"):
                raise DataError(f"{path}, line {number} is not JSON: the log is damaged.") from None


def _with_numbers(line: dict[str, Any]) -> dict[str, Any]:
    return {**line, **{name: math.nan if line.get(name) is None else line[name] for name in NUMBERS}}
