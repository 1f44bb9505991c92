"""Rows from JSON Lines, CSV, Parquet and folders of `datasets`, one at a time, each knowing where it stands.

No reader holds more than a part of its file, so that files may be larger than memory.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from halfstep.config.options import DataFormat
from halfstep.errors import DataError

LONGEST_CSV_FIELD = min(sys.maxsize, 2**31 - 1)
"""csv refuses fields of more than 131,072 characters where nobody says otherwise; documents are longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row.

    Attributes:
        where: the file and the line or row in it, for messages.
        values: by column.
    """

    where: str
    values: Mapping[str, Any]

    def column(self, name: str) -> Any:
        """The value of a column.

        Raises:
            DataError: there is no such column; those that exist are named.
        """
        if name not in self.values:
            known = ", ".join(f"`{column}`" for column in self.values) or "none"
            raise DataError(f"{self.where} has no column `{name}`. Its columns are {known}.")
        return self.values[name]

    def text(self, name: str) -> str:
        """The text of a column.

        Raises:
            DataError: there is no such column, or it holds no text, or an empty one.
        """
        value = self.column(name)
        if not isinstance(value, str):
            chat = ' Turns of a chat are read by `data.kind = "chat"`.' if isinstance(value, list) else ""
            raise DataError(f"{self.where}: `{name}` is {json.dumps(value, default=str)[:40]}; it must be a text.{chat}")
        if not value.strip():
            raise DataError(f"{self.where}: `{name}` is empty.")
        return value


def rows_of(paths: Sequence[Path], how: DataFormat) -> Iterator[Row]:
    """The rows of all files in their order.

    Args:
        paths: files, or folders that `datasets` has saved.
        how: how they are written.

    Raises:
        DataError: a file does not exist, holds no row, or has a fault; the message names file and line.
    """
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} does not exist.")
        found = False
        for row in READERS[how](path):
            found = True
            yield row
        if not found:
            raise DataError(f"{path} holds no row.")


def _json_lines(path: Path) -> Iterator[Row]:
    for number, line in _lines(path):
        where = f"{path}, line {number:,}"
        if not line.strip():
            raise DataError(f"{where} is empty. A row of JSON Lines is a table such as {{}}.")
        if line.lstrip().startswith("["):
            raise DataError(f"{where} begins a list. JSON Lines is one table on each line, with no list around them.")
        try:
            values = json.loads(line.rstrip("\r\n"))
        except json.JSONDecodeError as error:
            raise DataError(f"{where} is not JSON: {error.msg} at character {error.colno:,}.") from None
        if not isinstance(values, dict):
            raise DataError(f"{where} is not a table of columns: {line.strip()[:40]}")
        yield Row(where=where, values=values)


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_CSV_FIELD)
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    try:
        columns = next(reader, [])
        _check_header(columns, f"{path}, line 1")
        for fields in reader:
            where = f"{path}, line {reader.line_num:,}"
            if not fields:
                raise DataError(f"{where} is empty.")
            if len(fields) != len(columns):
                raise DataError(f"{where} has {len(fields)} fields, and the first line names {len(columns)} columns.")
            yield Row(where=where, values=dict(zip(columns, fields, strict=True)))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num:,} is not CSV: {error}.") from None


def _check_header(columns: Sequence[str], where: str) -> None:
    other = next((sign for sign in (";", "\t", "|") if len(columns) == 1 and sign in columns[0]), None)
    if other is not None:
        raise DataError(f"{where} separates its columns by {json.dumps(other)}, and CSV does so by commas. Convert the file.")
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{where} names the column `{twice}` twice.")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file in UTF-8, with or without its mark, numbered from 1."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, _decoded(line, f"{path}, line {number:,}", "utf-8-sig" if number == 1 else "utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def _decoded(content: bytes, where: str, encoding: str) -> str:
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8: byte {error.start:,} does not belong there. Convert the file.") from None


def _parquet(path: Path) -> Iterator[Row]:
    _library()
    parquet, arrow = import_module("pyarrow.parquet"), import_module("pyarrow")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(where=f"{path}, row {number:,}", values=values)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a Parquet file that can be read: {_first_line(error)}") from None


def saved_dataset(path: Path) -> Any:
    """What `datasets` has saved in a folder.

    Raises:
        DataError: it cannot be read, or holds several.
    """
    try:
        table = _library().load_from_disk(str(path))
    except Exception as error:  # whatever the readers of its files raise
        raise DataError(f"{path} is not a dataset that can be read: {_first_line(error)}") from None
    if isinstance(table, dict):
        raise DataError(f"{path} holds several datasets. Name one of them: {', '.join(str(path / name) for name in table)}.")
    return table


def class_name(feature: Any, value: object) -> object:
    """The name of a class where `datasets` knows it by its number; everything else as it is."""
    if hasattr(feature, "int2str") and isinstance(value, int) and 0 <= value < feature.num_classes:
        return feature.int2str(value)
    return value


def _dataset(path: Path) -> Iterator[Row]:
    table = saved_dataset(path)
    for number, values in enumerate(table, start=1):
        named = {column: class_name(table.features[column], value) for column, value in values.items()}
        yield Row(where=f"{path}, row {number:,}", values=named)


def _library() -> Any:
    try:
        return import_module("datasets")
    except ImportError:
        raise DataError(
            "Parquet and saved datasets need `datasets`, which is not installed: pip install 'halfstep[train]'."
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


READERS: Mapping[DataFormat, Callable[[Path], Iterator[Row]]] = {
    DataFormat.JSON_LINES: _json_lines,
    DataFormat.CSV: _csv,
    DataFormat.PARQUET: _parquet,
    DataFormat.DATASET: _dataset,
}
"""How each format is read."""
