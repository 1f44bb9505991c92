"""kill -9 at any moment: the next run goes on from what is there, and ends as if nobody had been killed, to the last bit.

Each place kills a run seven times, and each run goes on where the one before it was killed: 56 kills.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.runs import Net, Run, assert_same, forked
from halfstep import Checkpoints
from halfstep.checkpoint import tensor_file
from halfstep.engine.finish import Finish

KILLS = 7
EPOCHS = 30
GIVEN: dict[str, Any] = {"precision": "fp16", "epochs": EPOCHS}


def dies_at(number: int) -> Callable[..., None]:
    """Dies when it is called for the nth time."""
    calls = iter(range(number - 1))

    def call(*_: Any) -> None:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    return call


def before(module: Any, name: str, die: Callable[..., None]) -> None:
    original = getattr(module, name)

    def wrapped(*args: Any, **given: Any) -> Any:
        die()
        return original(*args, **given)

    setattr(module, name, wrapped)


def after(module: Any, name: str, die: Callable[..., None]) -> None:
    original = getattr(module, name)

    def wrapped(*args: Any, **given: Any) -> Any:
        value = original(*args, **given)
        die()
        return value

    setattr(module, name, wrapped)


PLACES: dict[str, tuple[int, Callable[[Callable[..., None]], object]]] = {
    "in a forward": (8, lambda die: before(Net, "forward", die)),
    "after a backward": (8, lambda die: after(torch.autograd, "backward", die)),
    "before or after a step": (12, lambda die: (before(Finish, "_step", die), after(Finish, "_step", die))),
    "while a checkpoint is written": (90, lambda die: after(tensor_file, "_write", die)),
    "before bytes or names are on the disk": (16, lambda die: before(os, "fsync", die)),
    "before or after a checkpoint takes its place": (12, lambda die: (before(os, "replace", die), after(os, "replace", die))),
    "while an old one is removed": (6, lambda die: before(shutil, "rmtree", die)),
}
"""Where a run is killed: the most calls until then, and what counts them."""


def train(folder: Path, prepare: Callable[[Callable[..., None]], object] | None, number: int, pipe: Connection | None) -> None:
    """Go on with the run in the folder, and save after every update."""
    with Checkpoints(folder) as checkpoints:
        run = Run(**GIVEN, seed=number if checkpoints.updates else 0)
        checkpoints.load(run.engine)
        if prepare is not None:
            prepare(dies_at(number))
        if pipe is not None:
            pipe.send("goes on")
        for _ in run.updates():
            checkpoints.save(run.engine)


def train_at(folder: Path, place: str, number: int) -> None:
    train(folder, PLACES[place][1], number, None)


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    """What the run ends with when nobody kills it."""
    ended = Run(**GIVEN).finish()
    assert ended.engine.ledger.causes()["overflow"] > 0
    return ended.everything()


def assert_ends_as(whole: dict[str, Any], folder: Path) -> None:
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.updates, "all were killed before anything was saved"
        last = Run(**GIVEN, seed=1234)
        checkpoints.load(last.engine)
    assert_same(last.finish().everything(), whole)
    assert all("partial" not in path.name and "old" not in path.name for path in folder.iterdir())


@pytest.mark.parametrize("place", PLACES)
def test_killed_in_a_certain_place(place: str, whole: dict[str, Any], tmp_path: Path) -> None:
    draw = random.Random(place)
    for _ in range(KILLS):
        process = forked(train_at, tmp_path, place, draw.randint(1, PLACES[place][0]))
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    assert_ends_as(whole, tmp_path)


def test_killed_at_any_time(whole: dict[str, Any], tmp_path: Path) -> None:
    draw = random.Random(0)
    folders = (tmp_path / str(number) for number in count())
    kills, folder = 0, next(folders)
    while kills < KILLS or not saved(folder):
        ours, theirs = Pipe()
        process = forked(train, folder, None, kills, theirs)
        assert ours.recv() == "goes on"
        ours.poll(draw.uniform(0.02, 0.3))  # nothing comes: it waits
        process.kill()
        process.join(60)
        if process.exitcode == 0:  # it came to its end first: it is whole, and another one is to be killed
            assert_ends_as(whole, folder)
            folder = next(folders)
        else:
            assert process.exitcode == -signal.SIGKILL
            kills += 1
    assert_ends_as(whole, folder)


def saved(folder: Path) -> bool:
    with Checkpoints(folder) as checkpoints:
        return bool(checkpoints.updates)
