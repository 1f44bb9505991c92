"""Decides what the files hold: how they are written, what a row is, and which columns are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from halfstep.config.choice import Choice
from halfstep.config.decisions import Decisions, is_auto
from halfstep.config.options import DataFormat, DataKind, Task
from halfstep.config.schema import DataSection
from halfstep.errors import ConfigError

SUFFIXES = {
    ".jsonl": DataFormat.JSON_LINES,
    ".ndjson": DataFormat.JSON_LINES,
    ".json": DataFormat.JSON_LINES,
    ".csv": DataFormat.CSV,
    ".parquet": DataFormat.PARQUET,
}
"""What a file's name says; every other file is text."""
USUAL_COLUMNS = {
    DataKind.TEXT: ("text",),
    DataKind.CHAT: ("messages",),
    DataKind.COMPLETION: ("prompt", "completion"),
    DataKind.LABEL: ("text", "label"),
}
"""What data of each kind call their columns."""
KINDS = {
    Task.CAUSAL_LM: (DataKind.TEXT, DataKind.CHAT, DataKind.COMPLETION),
    Task.MASKED_LM: (DataKind.TEXT,),
    Task.SEQUENCE_CLASSIFICATION: (DataKind.LABEL,),
    Task.IMAGE_CLASSIFICATION: (DataKind.LABEL,),
}
"""What the rows can be from which each task is learned."""
DATASET_FILES = ("state.json", "dataset_dict.json")
"""What `save_to_disk` of `datasets` leaves in a folder of one dataset, and of several."""
ColumnsOf = Callable[[Sequence[str], DataFormat], Sequence[str]]


def no_columns(files: Sequence[str], how: DataFormat) -> Sequence[str]:
    """What is known of the columns where nobody has looked."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What the files hold; text files have no rows, and neither kind nor columns; of the user's own data nothing is known."""

    format: DataFormat | None
    kind: DataKind | None
    columns: tuple[str, ...] | None


def resolve_rows(asked: DataSection, task: Task, columns_of: ColumnsOf, decisions: Decisions) -> Rows:
    """What the files of the configuration hold.

    Raises:
        ConfigError: settings that contradict each other or the files.
    """
    if asked.factory is not None:
        return Rows(format=None, kind=None, columns=None)
    files = asked.files or []
    how = decisions.take("data.format", asked.format, lambda: _format(files, task))
    _check_format(how, task, files)
    if how is DataFormat.TEXT:
        _refuse_for_text(asked, task)
        return Rows(format=how, kind=None, columns=None)
    found = ("image", "label") if how is DataFormat.IMAGES else columns_of(files, how)
    kind = decisions.take("data.kind", asked.kind, lambda: _kind(found, task))
    if kind not in KINDS[task]:
        kinds = " or ".join(f'"{each}"' for each in KINDS[task])
        raise ConfigError(f'`data.kind = "{kind}"` is not what the task "{task}" learns from, which is {kinds}.')
    usual_names = ("image", "label") if task is Task.IMAGE_CLASSIFICATION else USUAL_COLUMNS[kind]
    named: list[str] = decisions.take("data.columns", asked.columns, lambda: _columns(kind, usual_names, found))
    columns = tuple(named)
    if len(columns) != len(usual_names):
        usual = ", ".join(f'"{name}"' for name in usual_names)
        raise ConfigError(
            f'`data.columns` names {len(columns)} columns, and data of the kind "{kind}" have {len(usual_names)}, as [{usual}].'
        )
    return Rows(format=how, kind=kind, columns=columns)


def _refuse_for_text(asked: DataSection, task: Task) -> None:
    for name in ("kind", "columns", "packing", "too_long"):
        in_pieces = name == "too_long" and task is Task.MASKED_LM  # whose texts are documents, between special tokens
        if not is_auto(getattr(asked, name)) and not in_pieces:
            raise ConfigError(
                f"`data.{name}` has no effect on text files: they are one stream of tokens, without rows, that fills every "
                "sequence. Leave it out, or give files with rows (JSON Lines, CSV, Parquet)."
            )


def _check_format(how: DataFormat, task: Task, files: Sequence[str]) -> None:
    if not files and (how is not DataFormat.TEXT or task.has_classes):
        raise ConfigError(f"`data.files` are not given, and {'the task' if task.has_classes else 'the format'} needs them.")
    if (task is Task.IMAGE_CLASSIFICATION) != (how is DataFormat.IMAGES) and how is not DataFormat.DATASET:
        raise ConfigError(f'`data.format = "{how}"` holds nothing for the task "{task}": {_needed(task)}.')
    if task is Task.SEQUENCE_CLASSIFICATION and how is DataFormat.TEXT:
        raise ConfigError(f'Text files have no labels, and the task "{task}" needs them: {_needed(task)}.')


def _needed(task: Task) -> str:
    if task is Task.IMAGE_CLASSIFICATION:
        return "name a folder that holds a folder of pictures for each class, or one that `datasets` has saved"
    rows = "files with rows (JSON Lines, CSV, Parquet), or a folder that `datasets` has saved"
    return f"name {rows}" if task.has_classes else f"name text files, {rows}"


def _format(files: Sequence[str], task: Task) -> Choice[DataFormat]:
    if task is Task.IMAGE_CLASSIFICATION and files and not any(map(is_saved_dataset, files)):
        return Choice(value=DataFormat.IMAGES, reason="pictures in a folder a class")
    if files and all(map(is_saved_dataset, files)):
        return Choice(value=DataFormat.DATASET, reason="what `datasets` has saved lies there")
    formats = {SUFFIXES.get(PurePath(file).suffix.lower(), DataFormat.TEXT) for file in files}
    if len(formats) > 1:
        raise ConfigError(f"`data.files` names files of several kinds ({', '.join(sorted(formats))}). Name files of one kind.")
    if not files or formats == {DataFormat.TEXT}:
        return Choice(value=DataFormat.TEXT, reason="no file's name says that it has rows")
    return Choice(value=formats.pop(), reason="by the names of the files")


def is_saved_dataset(folder: str) -> bool:
    """Whether `datasets` has saved one dataset, or several, in the folder."""
    return any((Path(folder) / name).is_file() for name in DATASET_FILES)


def _kind(found: Sequence[str], task: Task) -> Choice[DataKind]:
    if task is not Task.CAUSAL_LM:
        return Choice(value=KINDS[task][0], reason=f'what the task "{task}" learns from')
    for kind in (DataKind.CHAT, DataKind.COMPLETION):
        if set(USUAL_COLUMNS[kind]) <= set(found):
            return Choice(value=kind, reason=f"by the columns of the first row: {', '.join(found)}")
    return Choice(value=DataKind.TEXT, reason=f"no columns of a chat or of completions: {', '.join(found) or 'unknown'}")


def _columns(kind: DataKind, usual: Sequence[str], found: Sequence[str]) -> Choice[list[str]]:
    if kind is DataKind.TEXT and len(found) == 1:
        return Choice(value=list(found), reason="the only one")
    return Choice(value=list(usual), reason=f'usual for the kind "{kind}"')
