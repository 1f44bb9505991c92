"""The folder of a run.

::

    RUN/
    ├── config.toml      the resolved configuration, each automatic value with its reason; runs again as it is
    ├── run.json         the same with all choices, what the run was, and how it ended
    ├── log.jsonl        every update and evaluation, one JSON object a line
    ├── ledger.jsonl     every update: applied, or skipped and why
    ├── events/          TensorBoard
    ├── model/           the last model, for `from_pretrained`
    └── best/            the best model, where one was kept that is not the last
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from halfstep.config.run import Resolved
from halfstep.errors import ConfigError
from halfstep.train.disk import folder_beside, write_text, writing


class RunFolder:
    """The folder of one run, which nobody else has used.

    Args:
        path: a folder that does not exist or is empty.
        resolved: the run, which is written there at once.
        about: what else is known at the start: versions, machine, time.

    Raises:
        ConfigError: the folder already holds something.
        UsageError: the folder cannot be written.
    """

    def __init__(self, path: Path, resolved: Resolved, about: Mapping[str, Any]) -> None:
        self.path = path
        self._record: dict[str, Any] = {"status": "running", **about, **resolved.to_dict()}
        refuse_used(path)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            (path / "run.json").touch(exist_ok=False)
        write_text(path / "config.toml", resolved.to_toml())
        self.note()

    def note(self, **values: Any) -> None:
        """Add to what run.json says.

        Raises:
            UsageError: the folder cannot be written.
        """
        self._record.update(values)
        write_text(self.path / "run.json", json.dumps(self._record, indent=2) + "\n")

    def save_model(self, name: str, model: nn.Module, tokenizer: Any | None) -> Path:
        """Write the model, and its tokenizer where it has one, as a folder for `from_pretrained`.

        Raises:
            ModelError: the model's own `save_pretrained` fails.
            UsageError: the folder cannot be written.
        """
        with folder_beside(self.path / name) as folder:
            _save(model, folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(folder))
        return self.path / name

    def save_ledger(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Write what became of each update.

        Raises:
            UsageError: the folder cannot be written.
        """
        write_text(self.path / "ledger.jsonl", "".join(json.dumps(dict(entry)) + "\n" for entry in entries))


def refuse_used(path: Path) -> None:
    """Raise a `ConfigError` if the folder holds a run, or anything else."""
    if (path / "run.json").exists():
        raise ConfigError(f"`run.folder`: {path} already holds a run. Give another folder, or move that run away.")
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"`run.folder`: {path} is not empty. Give a folder that does not exist yet.")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"`run.folder`: {path} is a file. Give a folder that does not exist yet.")


def _save(model: nn.Module, folder: Path) -> None:
    """`save_pretrained`, whose writer of weights raises a class of its own where the disk fails."""
    from safetensors import SafetensorError

    try:
        model.save_pretrained(str(folder))  # type: ignore[operator]  # every model that is trained here has it
    except SafetensorError as error:
        raise OSError(_error_number(str(error)), str(error)) from error


def _error_number(message: str) -> int:
    """The number in "... (os error 28)"; 0 where there is none."""
    number = message.rpartition("(os error ")[2].partition(")")[0]
    return int(number) if number.isdigit() else 0
