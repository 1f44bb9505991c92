"""Rows are read one at a time, and every fault is named with its place."""

from __future__ import annotations

import csv
import json
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.config.options import DataFormat as Format
from halfstep.config.rows import SUFFIXES
from halfstep.errors import DataError
from halfstep.train.tables import Row, rows_of

ROWS: list[dict[str, Any]] = [{"text": 'one\ntwo, "three"', "label": "a"}, {"text": "zwölf", "label": "b"}]


def write(path: Path, how: Format, rows: list[dict[str, Any]]) -> Path:
    if how is Format.JSON_LINES:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif how is Format.CSV:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif how is Format.PARQUET:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def fault(path: Path, how: Format | None = None) -> str:
    how = how or SUFFIXES[path.suffix]
    with pytest.raises(DataError) as error:
        list(rows_of([path], how))
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "how"),
    [("a.jsonl", Format.JSON_LINES), ("a.csv", Format.CSV), ("a.parquet", Format.PARQUET), ("a", Format.DATASET)],
)
def test_the_same_rows_come_out_of_every_format(tmp_path: Path, name: str, how: Format) -> None:
    path = write(tmp_path / name, how, ROWS)
    assert [dict(row.values) for row in rows_of([path, path], how)] == ROWS * 2


@given(st.lists(st.fixed_dictionaries({"a": st.text(), "b": st.text()}), min_size=1, max_size=5))
def test_json_lines_and_csv_give_back_any_text(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]]) -> None:
    folder = tmp_path_factory.mktemp("rows")
    for name, how in (("a.jsonl", Format.JSON_LINES), ("a.csv", Format.CSV)):
        assert [dict(row.values) for row in rows_of([write(folder / name, how, rows)], how)] == rows


def test_a_row_knows_where_it_stands(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", Format.CSV, ROWS)
    assert [row.where for row in rows_of([path], Format.CSV)] == [f"{path}, line 3", f"{path}, line 4"]
    path = write(tmp_path / "a.parquet", Format.PARQUET, ROWS)
    assert [row.where for row in rows_of([path], Format.PARQUET)] == [f"{path}, row 1", f"{path}, row 2"]


def test_a_column_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(DataError) as error:
        Row(where="a.csv, line 2", values={"text": "x", "label": "y"}).column("txt")
    assert str(error.value) == "a.csv, line 2 has no column `txt`. Its columns are `text`, `label`."


@pytest.mark.parametrize(
    ("value", "told"), [(" \n", "is empty."), (7, "is 7; it must be a text."), (None, "is null; it must be a text.")]
)
def test_a_text_that_is_none_is_named(value: object, told: str) -> None:
    with pytest.raises(DataError) as error:
        Row(where="a.jsonl, line 2", values={"text": value}).text("text")
    assert str(error.value) == f"a.jsonl, line 2: `text` {told}"


def test_a_broken_line_of_json_is_numbered(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n{"text": "y"\n')
    assert fault(path) == f"{path}, line 2 is not JSON: Expecting ',' delimiter at character 13."
    path.write_text('{"text": "x"}\n\n{"text": "y"}\n')
    assert fault(path) == f"{path}, line 2 is empty. A row of JSON Lines is a table such as {{}}."
    path.write_text("3\n")
    assert fault(path) == f"{path}, line 1 is not a table of columns: 3"
    path.write_text('[\n{"text": "x"}\n]\n')
    assert fault(path) == f"{path}, line 1 begins a list. JSON Lines is one table on each line, with no list around them."


def test_a_broken_line_of_csv_is_numbered(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\nx,1\ny\n")
    assert fault(path) == f"{path}, line 3 has 1 fields, and the first line names 2 columns."
    path.write_text("text,label\nx,1\n\ny,2\n")
    assert fault(path) == f"{path}, line 3 is empty."
    path.write_text("text,label,text\nx,1,y\n")
    assert fault(path) == f"{path}, line 1 names the column `text` twice."
    path.write_text("text;label\nx;1\n")
    assert fault(path) == f'{path}, line 1 separates its columns by ";", and CSV does so by commas. Convert the file.'
    path.write_text('text,label\n"x,1\n')
    assert fault(path) == f"{path}, line 2 is not CSV: unexpected end of data."


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_file_that_is_not_utf8_is_named_with_line_and_byte(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b'{"text": "x"}\n{"text": "caf\xe9"}\n')
    assert fault(path) == f"{path}, line 2 is not UTF-8: byte 13 does not belong there. Convert the file."


def test_a_mark_of_utf8_at_the_start_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("\ufefftext\r\nx\r\n".encode())
    assert [dict(row.values) for row in rows_of([path], Format.CSV)] == [{"text": "x"}]


def test_files_without_rows_or_of_another_kind_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    assert fault(path) == f"{path} does not exist."
    path.write_bytes(b"nothing of the kind")
    assert fault(path).startswith(f"{path} is not a Parquet file that can be read: ")
    (tmp_path / "a.jsonl").write_text("")
    assert fault(tmp_path / "a.jsonl") == f"{tmp_path}/a.jsonl holds no row."
    (tmp_path / "b.csv").write_text("text\n")
    assert fault(tmp_path / "b.csv") == f"{tmp_path}/b.csv holds no row."


def test_a_folder_of_several_datasets_is_answered_with_their_names(tmp_path: Path) -> None:
    part = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "both"))
    both = tmp_path / "both"
    assert fault(both, Format.DATASET) == f"{both} holds several datasets. Name one of them: {both}/train, {both}/test."
    assert len(list(rows_of([both / "train"], Format.DATASET))) == 2


@pytest.mark.parametrize(("name", "how"), [("a.jsonl", Format.JSON_LINES), ("a.csv", Format.CSV), ("a.parquet", Format.PARQUET)])
def test_a_long_file_is_never_held_whole(tmp_path: Path, name: str, how: Format) -> None:
    if how is Format.PARQUET:
        table = pyarrow.table({"text": ["x" * 1000] * 8000})
        pyarrow.parquet.write_table(table, tmp_path / name, row_group_size=512, use_dictionary=False)
        del table
    else:
        write(tmp_path / name, how, [{"text": "x" * 1000}] * 8000)
    held = pyarrow.total_allocated_bytes()
    tracemalloc.start()
    try:
        in_arrow = max(pyarrow.total_allocated_bytes() - held for _ in rows_of([tmp_path / name], how))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak + in_arrow < 8_000_000 / 2
