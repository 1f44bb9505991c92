"""Decides what the files hold: how they are written, what a row is, and which columns are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from halfstep.config.choice import Choice
from halfstep.config.decisions import Decisions, is_auto
from halfstep.config.options import DataFormat, DataKind
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
}
"""What data of each kind call their columns."""
ColumnsOf = Callable[[Sequence[str], DataFormat], Sequence[str]]


def no_columns(files: Sequence[str], how: DataFormat) -> Sequence[str]:
    """What is known of the columns where nobody has looked."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What the files hold; text files have no rows, and neither kind nor columns."""

    format: DataFormat
    kind: DataKind | None
    columns: tuple[str, ...] | None


def resolve_rows(asked: DataSection, columns_of: ColumnsOf, decisions: Decisions) -> Rows:
    """What the files of the configuration hold.

    Raises:
        ConfigError: settings that contradict each other or the files.
    """
    files = asked.files or []
    how = decisions.take("data.format", asked.format, lambda: _format(files))
    if how is DataFormat.TEXT:
        _refuse_for_text(asked)
        return Rows(format=how, kind=None, columns=None)
    if not files:
        raise ConfigError(f'`data.format = "{how}"` needs `data.files`, which are not given.')
    found = columns_of(files, how)
    kind = decisions.take("data.kind", asked.kind, lambda: _kind(found))
    named: list[str] = decisions.take("data.columns", asked.columns, lambda: _columns(kind, found))
    columns = tuple(named)
    if len(columns) != len(USUAL_COLUMNS[kind]):
        usual = ", ".join(f'"{name}"' for name in USUAL_COLUMNS[kind])
        raise ConfigError(
            f'`data.columns` names {len(columns)} columns, and data of the kind "{kind}" have {len(USUAL_COLUMNS[kind])}, '
            f"as [{usual}]."
        )
    return Rows(format=how, kind=kind, columns=columns)


def _refuse_for_text(asked: DataSection) -> None:
    for name in ("kind", "columns", "packing", "too_long"):
        if not is_auto(getattr(asked, name)):
            raise ConfigError(
                f"`data.{name}` has no effect on text files: they are one stream of tokens, without rows, that fills every "
                "sequence. Leave it out, or give files with rows (JSON Lines, CSV, Parquet)."
            )


def _format(files: Sequence[str]) -> Choice[DataFormat]:
    formats = {SUFFIXES.get(PurePath(file).suffix.lower(), DataFormat.TEXT) for file in files}
    if len(formats) > 1:
        raise ConfigError(f"`data.files` names files of several kinds ({', '.join(sorted(formats))}). Name files of one kind.")
    if not files or formats == {DataFormat.TEXT}:
        return Choice(value=DataFormat.TEXT, reason="no file's name says that it has rows")
    return Choice(value=formats.pop(), reason="by the names of the files")


def _kind(found: Sequence[str]) -> Choice[DataKind]:
    for kind in (DataKind.CHAT, DataKind.COMPLETION):
        if set(USUAL_COLUMNS[kind]) <= set(found):
            return Choice(value=kind, reason=f"by the columns of the first row: {', '.join(found)}")
    return Choice(value=DataKind.TEXT, reason=f"no columns of a chat or of completions: {', '.join(found) or 'unknown'}")


def _columns(kind: DataKind, found: Sequence[str]) -> Choice[list[str]]:
    if kind is DataKind.TEXT and len(found) == 1:
        return Choice(value=list(found), reason="the only one")
    return Choice(value=list(USUAL_COLUMNS[kind]), reason=f'usual for the kind "{kind}"')
