"""The folder of a run.

::

    RUN/
    ├── config.toml      the resolved configuration, each automatic value with its reason; runs again as it is
    ├── run.json         the same with all choices, what the run was, and how it ended
    ├── log.jsonl        every update and evaluation, one JSON object a line
    ├── ledger.jsonl     every update: applied, or skipped and why
    ├── report.html      curves, choices and how it ended, as a page that opens offline
    ├── events/          TensorBoard
    ├── watch.html       what is wrong, and watch.json, where `watch = true`
    ├── checkpoints/     the whole state of the run, to go on from
    ├── model/           the last model, for `from_pretrained`; in `adapter` below it the adapter, where there is one
    └── best/            the best model by its held-out data, unless that is the last one
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep import __version__
from halfstep.config.choice import Choice
from halfstep.config.run import Resolved, choices_to_dict
from halfstep.errors import ConfigError, UsageError
from halfstep.report.run_page import run_page
from halfstep.report.runs import read_run
from halfstep.train.adapters import is_adapted, merged
from halfstep.train.disk import folder_beside, mend, to_json, write_text, writing
from halfstep.train.log import JsonLines, LedgerFile, TensorBoard
from halfstep.train.models import quiet
from halfstep.train.record import Listener
from halfstep.train.summary import Summary


class RunFolder:
    """The folder of one run, which nobody else has used.

    Args:
        path: a folder that does not exist or is empty.
        resolved: the run, which is written there at once.

    Raises:
        ConfigError: the folder already holds something.
        UsageError: the folder cannot be written.
    """

    def __init__(self, path: Path, resolved: Resolved) -> None:
        self.path = path
        self._record: dict[str, Any] = {"status": "running", **_versions(), **resolved.to_dict()}
        refuse_used(path)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            (path / "run.json").touch(exist_ok=False)
        write_text(path / "config.toml", resolved.to_toml())
        self.note()

    @classmethod
    def again(cls, path: Path, **values: Any) -> RunFolder:
        """The folder of a run that goes on; `values` are added to the list of its resumes in run.json.

        Raises:
            UsageError: the folder cannot be written.
        """
        folder = cls.__new__(cls)
        folder.path, folder._record = path, read_record(path)
        for name in ("model", "best"):
            mend(path / name)
        resumes = [*folder._record.get("resumes", []), {**_versions(), **values}]
        folder._record.pop("error", None)
        folder.note(status="running", resumes=resumes)
        return folder

    def note(self, **values: Any) -> None:
        """Add to what run.json says.

        Raises:
            UsageError: the folder cannot be written.
        """
        self._record.update(values)
        write_text(self.path / "run.json", to_json(self._record, indent=2) + "\n")

    def finish(self, summary: Summary, choices: Mapping[str, Choice[Any]]) -> None:
        """Note how the run ended and what the engine chose on the way, and write its page. A best model that is the last goes.

        Raises:
            UsageError: the folder cannot be written.
        """
        if summary.best is not None and summary.best == summary.final:
            shutil.rmtree(self.path / "best", ignore_errors=True)
        self.note(status=summary.ending.value, summary=summary.to_dict(), engine=choices_to_dict(choices))
        write_text(self.path / "report.html", run_page([read_run(self.path)]))

    @contextmanager
    def failures_noted(self) -> Iterator[None]:
        """Note in run.json, as far as the disk lets us, if what happens below this fails."""
        try:
            yield
        except BaseException as error:
            with suppress(UsageError):
                self.note(status="failed", error=str(error) or type(error).__name__)
            raise

    def logs(self, *, tensorboard: bool, after: int | None = None) -> list[Listener]:
        """The files that grow while the run goes; where it goes on, after the update that it goes on from.

        Raises:
            UsageError: the folder cannot be written.
        """
        files: list[Listener] = [
            JsonLines(self.path / "log.jsonl", after=after),
            LedgerFile(self.path / "ledger.jsonl", after=after),
        ]
        return [*files, TensorBoard(self.path / "events", after=after)] if tensorboard else files

    def save_model(self, name: str, model: nn.Module, tokenizer: Any | None) -> Path:
        """Write the model, and its tokenizer where it has one, as a folder for `from_pretrained`.

        Raises:
            ModelError: the model's own `save_pretrained` fails.
            UsageError: the folder cannot be written.
        """
        save_pretrained(self.path / name, model, tokenizer)
        return self.path / name


def save_pretrained(path: Path, model: nn.Module, beside: Any | None) -> None:
    """Write a model, and what is kept beside it, as a folder for `from_pretrained`.

    Raises:
        ModelError: the model's own `save_pretrained` fails.
        UsageError: the folder cannot be written.
    """
    with folder_beside(path) as folder:
        _save(model, folder)
        if beside is not None:
            beside.save_pretrained(str(folder))


def read_record(path: Path) -> dict[str, Any]:
    """What run.json says.

    Raises:
        ConfigError: the folder holds no run.
    """
    try:
        record: dict[str, Any] = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{path} holds no run that can go on: its run.json cannot be read.") from None
    return record


def refuse_used(path: Path) -> None:
    """Raise a `ConfigError` if the folder holds a run, or anything else."""
    if (path / "run.json").exists():
        raise ConfigError(f"`run.folder`: {path} already holds a run. Give another folder, or move that run away.")
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"`run.folder`: {path} is not empty. Give a folder that does not exist yet.")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"`run.folder`: {path} is a file. Give a folder that does not exist yet.")


def _versions() -> dict[str, Any]:
    return {
        "halfstep": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "host": platform.node(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _save(model: nn.Module, folder: Path) -> None:
    """`save_pretrained` where the model has it; the writer of weights raises a class of its own where the disk fails.

    A model with adapters is saved as a plain one, into whose weights they went, and they alone in the folder `adapter`.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    plain = merged(model) if is_adapted(model) else model
    try:
        with quiet():
            if is_adapted(model):
                model.save_pretrained(str(folder / "adapter"), save_embedding_layers=False)  # type: ignore[operator]
            if hasattr(plain, "save_pretrained"):
                plain.save_pretrained(str(folder))  # type: ignore[operator]  # the same
            else:
                save_model(plain, str(folder / "model.safetensors"))
    except SafetensorError as error:
        raise OSError(_error_number(str(error)), str(error)) from error


def _error_number(message: str) -> int:
    """The number in "... (os error 28)"; 0 where there is none."""
    number = message.rpartition("(os error ")[2].partition(")")[0]
    return int(number) if number.isdigit() else 0
