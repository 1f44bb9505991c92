"""What a process heard is there for the others, also where it is killed without a word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from halfstep.errors import UsageError
from halfstep.record.running import Ending
from halfstep.record.session import Session
from halfstep.record.termination import Termination
from halfstep.record.watching import watch
from halfstep.record.writing import CLAIM, FINAL, LATEST, Writer, read, reporting


def writer_of(folder: Path, session: Session) -> Writer:
    return Writer(session, folder, Termination(lambda ending: ending.code), "7")


def test_a_process_that_is_watched_writes_now_and_then_and_less_often_later(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, Session())
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    writer.watch()
    try:
        writer.update_ended(optimizer, None)
        assert list(tmp_path.iterdir()) == []
        writer.begun_s -= 100.0
        writer.next_s = 0.0
        writer.update_ended(optimizer, None)
        assert [path.name for path in tmp_path.iterdir()] == [f"7{LATEST}"]
        assert writer.next_s - writer.begun_s > 200.0
        assert [heard.ending for heard in read(tmp_path)] == ["it was ended from outside"]
    finally:
        writer.end(Ending())
    assert [heard.ending for heard in read(tmp_path)] == [""]


def test_a_folder_that_is_gone_is_no_fault(tmp_path: Path) -> None:
    """Another rank has reported."""
    writer_of(tmp_path / "gone", Session()).end(Ending(1, "it raised ValueError"))


@pytest.mark.parametrize(("launched", "code"), [(False, 1), (True, 0)])
def test_a_finding_is_the_exit_code_but_not_under_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: bool, code: int
) -> None:
    """A launcher takes 1 for a rank that failed, and may start all of them again."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("TORCHELASTIC_RUN_ID", tmp_path.name)) if launched else ():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.py").write_text("")
    assert watch(str(tmp_path / "train.py"), [], module=False, report=lambda ending, heard: 1) == code


def test_a_folder_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("getpass.getuser", lambda: "me")
    monkeypatch.setattr("os.getuid", lambda: -1)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(UsageError) as error:
        watch(str(tmp_path / "train.py"), [], module=False, report=lambda ending, heard: 0)
    assert str(error.value) == (
        f"{tmp_path}/halfstep-watch-me-here-1- belongs to another user, and what lies there is not trusted: "
        "set TMPDIR to a folder of yours."
    )


def test_a_file_that_gets_its_final_name_while_the_first_rank_looks_does_not_cost_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(folder: Path) -> Iterator[Path]:
        (folder / f"1{FINAL}").touch()
        return iter([folder / f"1{FINAL}-7.part"])

    monkeypatch.setattr(Path, "iterdir", listed)
    assert reporting(tmp_path, rank=0, size=2)
    assert (tmp_path / CLAIM).exists()


def test_a_folder_that_is_gone_has_been_reported_by_another_rank(tmp_path: Path) -> None:
    assert not reporting(tmp_path / "gone", rank=1, size=2)
