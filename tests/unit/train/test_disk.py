"""Writes leave the old or the new, never half of one."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from halfstep.errors import UsageError
from halfstep.train.disk import folder_beside, write_text, writing


def test_a_failed_write_leaves_the_old_text_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    write_text(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "\ud800")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_folder_that_was_not_filled_leaves_the_old_one(tmp_path: Path) -> None:
    for content in ("old", "new"):
        with folder_beside(tmp_path / "model") as folder:
            (folder / "weights").write_text(content)
    with pytest.raises(KeyError):
        fill_half(tmp_path / "model")
    assert (tmp_path / "model" / "weights").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def fill_half(path: Path) -> None:
    with folder_beside(path) as folder:
        (folder / "weights").write_text("half")
        raise KeyError


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_a_sentence(number: int) -> None:
    with pytest.raises(UsageError) as error, writing(Path("runs/model")):
        raise OSError(number, "no matter")
    assert str(error.value) == "runs/model cannot be written: the disk is full. What was saved before is still there."


def test_another_failure_keeps_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as error:
        write_text(tmp_path / "file" / "run.json", "text")
    assert str(error.value) == f"{tmp_path}/file/run.json cannot be written: Not a directory."


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device without room")
def test_a_device_without_room_is_a_full_disk() -> None:
    with pytest.raises(UsageError) as error, writing(Path("run/log.jsonl")):
        Path("/dev/full").write_text("x")
    assert str(error.value).startswith("run/log.jsonl cannot be written: the disk is full.")
