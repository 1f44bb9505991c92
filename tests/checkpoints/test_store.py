"""What lies in a folder of checkpoints: the last ones, whole; one run at a time; and nothing half done, also on a full disk."""

from __future__ import annotations

import copy
import errno
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from checkpoints.runs import Run, assert_same, forked, saved
from halfstep import Checkpoints, Engine
from halfstep.errors import ConfigError, ModelError, UsageError


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    run = Run()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for _ in run.updates():
            checkpoints.save(run.engine)
        checkpoints.wait()
        assert checkpoints.updates == [11, 12]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "update-00000011", "update-00000012"]


def test_the_files_are_safetensors_and_json(tmp_path: Path) -> None:
    run = Run()
    with Checkpoints(tmp_path) as checkpoints:
        folder = checkpoints.save(run.engine, wait=True)
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    tensors = load_file(folder / "rank-00000.safetensors")
    for name, parameter in run.model.named_parameters():
        assert torch.equal(tensors[f"model.{name}"], parameter)
    assert "model.last.weight" not in tensors  # the same parameter as model.second.weight


def test_what_was_saved_is_the_state_at_that_update_however_far_training_has_gone(tmp_path: Path) -> None:
    run, updates = Run(), 0
    kept = {}
    with Checkpoints(tmp_path, keep=20) as checkpoints:
        for update in run.updates():
            kept[update.index] = copy.deepcopy(run.everything())
            checkpoints.save(run.engine)
            updates = update.index
    for index in (updates, updates // 2, 1):
        second = Run(seed=3)
        with Checkpoints(tmp_path, keep=20) as checkpoints:
            checkpoints.load(second.engine, update=index)
        assert_same(second.everything(), kept[index])


def test_writing_ends_with_the_checkpoints(tmp_path: Path) -> None:
    saved(tmp_path)
    assert [thread for thread in threading.enumerate() if "checkpoint" in thread.name] == []


def hold(folder: Path, pipe: Connection) -> None:
    with Checkpoints(folder) as checkpoints:
        checkpoints.load(Run().engine)
        pipe.send("held")
        pipe.recv()


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    other = forked(hold, tmp_path, theirs)
    assert ours.recv() == "held"
    run = Run()
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(UsageError) as told:
        checkpoints.save(run.engine)
    assert str(told.value) == (f"{tmp_path} is in use by another run that is still going. Wait for it to end, or end it.")
    assert other.pid is not None
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(run.engine)


def test_what_a_killed_run_left_half_done_is_removed_and_never_read(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "update-00000003.partial").mkdir()
    (folder / "update-00000001").rename(folder / "update-00000001.old")
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.load(Run().engine)
        assert restored is not None
        assert restored.update == 2
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "update-00000002"]


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """Files cannot grow beyond so many bytes: what a full disk is to a writer."""
    before, heard = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, heard)


@contextmanager
def full_at(number: int) -> Iterator[None]:
    """The disk is found to be full when something is put on it for the nth time."""
    left, fsync = [number], os.fsync

    def fails(descriptor: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        yield


FULL = {
    "before the first byte": lambda: small_files(0),
    "in the midst of the tensors": lambda: small_files(2000),
    "when the tensors are to be on the disk": lambda: full_at(1),
    "when the manifest is to be on the disk": lambda: full_at(2),
    "when the names are to be on the disk": lambda: full_at(3),
}


@pytest.mark.parametrize("when", FULL)
def test_on_a_full_disk_the_one_before_stays_and_the_run_can_go_on(when: str, tmp_path: Path) -> None:
    run = Run()
    with Checkpoints(tmp_path) as checkpoints:
        for update in run.updates():
            if update.index == 2:
                checkpoints.save(run.engine, wait=True)
            if update.index == 4:
                with FULL[when](), pytest.raises(UsageError) as told:
                    checkpoints.save(run.engine, wait=True)
                break
        assert str(told.value) == (
            f"{tmp_path}/update-00000004 cannot be written: the disk is full. What was saved before is still there."
        )
        assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "update-00000002"]
    second = Run(seed=8)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.load(second.engine)
    assert_same(second.finish().everything(), Run().finish().everything())


def test_what_failed_in_the_background_is_told_at_the_next_save(tmp_path: Path) -> None:
    run = Run()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(run.engine, wait=True)
    run.engine.update([torch.randn(2, 4)])
    with small_files(0):
        checkpoints.save(run.engine)
        with pytest.raises(UsageError, match="the disk is full"):
            checkpoints.save(run.engine)
    checkpoints.save(run.engine)
    checkpoints.close()
    assert checkpoints.updates == [0, 1]


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError) as told:
        Checkpoints(tmp_path / "file").save(Run().engine)
    assert str(told.value) == f"{tmp_path}/file cannot be written: File exists."


def test_at_least_one_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as told:
        Checkpoints(tmp_path, keep=0)
    assert str(told.value) == "`keep = 0` keeps no checkpoint: it must be at least 1."


class Bare:
    def step(self) -> None:
        pass

    def update_parameters(self, model: nn.Module) -> None:
        pass


@pytest.mark.parametrize(
    ("given", "extra", "told"),
    [
        ({}, {1, 2}, "`extra` holds a set, which a checkpoint cannot keep: it keeps numbers, text, lists, tables and tensors."),
        ({"scheduler": Bare()}, None, "The scheduler Bare has no `state_dict`, so that a run with it cannot be resumed."),
        ({"ema": Bare()}, None, "The averaged weights are a Bare, which is no module: they cannot be saved."),
    ],
)
def test_what_cannot_be_kept_is_refused(given: dict[str, object], extra: object, told: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    engine = Engine(model, torch.optim.SGD(model.parameters()), precision="fp32", **given)  # type: ignore[arg-type]
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ModelError) as error:
        checkpoints.save(engine, extra)
    assert str(error.value) == told
