"""What the launcher says about a process."""

from __future__ import annotations

import pytest

from halfstep.distributed.env import World, world
from halfstep.errors import ConfigError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_there_is_one_process() -> None:
    assert world() == World(rank=0, size=1, local_rank=0, local_size=1)
    assert world().is_first


def test_torchruns_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ["5", "8", "1", "4"], strict=True):
        monkeypatch.setenv(name, value)
    assert world() == World(rank=5, size=8, local_rank=1, local_size=4)
    assert not world().is_first


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "")
    assert world().size == 1


@pytest.mark.parametrize("value", ["two", "-1", "1.0"])
def test_what_is_not_a_number_is_a_sentence(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(ConfigError) as told:
        world()
    assert str(told.value) == f"The environment variable WORLD_SIZE is {value!r}; torchrun sets it to a whole number."
