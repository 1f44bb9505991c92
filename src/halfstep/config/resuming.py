"""The configuration of a run that goes on: the one that it began with, but for what changes no number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from halfstep.config.decisions import is_auto
from halfstep.config.load import load
from halfstep.config.schema import Written
from halfstep.config.toml import toml_value
from halfstep.errors import ConfigError

MAY_CHANGE = (
    "processes",
    "batch.micro",
    "data.workers",
    "limits.minutes",
    "evaluation.keep_best",
    "checkpoint.every_updates",
    "checkpoint.every_minutes",
    "checkpoint.keep",
    "run.tensorboard",
    "run.loggers",
    "run.rank_minutes",
)
"""Keys that change no update, but for the rounding of another split of the same global batches."""


def holds_run(folder: Path) -> bool:
    """Whether a run was begun in this folder."""
    return (folder / "run.json").is_file() and (folder / "config.toml").is_file()


def load_resumed(folder: Path, settings: Sequence[str], *, ranks: int) -> Written:
    """The configuration of the run in `folder`, to go on with.

    Args:
        folder: of the run.
        settings: `key=value` strings laid over it.
        ranks: processes that a launcher has started; 1 for none.

    Raises:
        ConfigError: the folder holds no run, or one that has finished, or a setting would change the run's numbers.
    """
    _check_holds_run(folder, "--resume")
    if _status(folder) == "finished":
        raise ConfigError(
            f"`--resume {folder}`: the run has finished. To train its model further, begin a run with "
            f"`model.path={folder}/model`."
        )
    for setting in settings:
        key = setting.partition("=")[0].strip()
        if key not in MAY_CHANGE:
            raise ConfigError(
                f"`{key}` cannot be changed while a run goes on: it keeps its configuration, and with it its numbers. These can "
                f"be changed: {', '.join(f'`{name}`' for name in MAY_CHANGE)}."
            )
    place = f"run.folder={toml_value(str(folder))}"
    started = [] if ranks == 1 else [f"processes={ranks}"]
    written = load(folder / "config.toml", [*settings, *started, place])
    return load(folder / "config.toml", [*settings, *started, place, *_split(written)])


def load_kept(folder: Path) -> Written:
    """The configuration of the run in `folder`, for one process.

    Raises:
        ConfigError: the folder holds no run.
    """
    _check_holds_run(folder, "--export")
    return load(folder / "config.toml", ["processes=1", "sharding=none", f"run.folder={toml_value(str(folder))}"])


def _check_holds_run(folder: Path, option: str) -> None:
    if not holds_run(folder):
        raise ConfigError(f"`{option} {folder}`: it holds no run (run.json and config.toml). Give the folder of a run.")


def _split(written: Written) -> list[str]:
    """A smaller micro-batch, where that of the run does not divide its global batch over the ranks that it has now."""
    batch, ranks = written.batch, written.processes
    if is_auto(batch.global_) or is_auto(batch.micro) or is_auto(ranks):
        return []
    assert isinstance(batch.global_, int)
    assert isinstance(batch.micro, int)
    assert isinstance(ranks, int)
    if batch.global_ % (batch.micro * ranks) == 0 or batch.global_ % ranks:
        return []
    share = batch.global_ // ranks
    return [f"batch.micro={max(size for size in range(1, batch.micro) if share % size == 0)}"]


def _status(folder: Path) -> str:
    try:
        return str(json.loads((folder / "run.json").read_text(encoding="utf-8")).get("status"))
    except (OSError, ValueError):
        return "unknown"
