"""A checkpoint that is not as it was written is refused by name, and the one before it is offered; nothing is unpickled."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.runs import Net, Run, assert_same, saved
from halfstep import Checkpoints
from halfstep.errors import CheckpointError

DATA = "rank-00000.safetensors"


def refusal(folder: Path, update: int | None = None, **given: Any) -> str:
    with Checkpoints(folder) as checkpoints, pytest.raises(CheckpointError) as told:
        checkpoints.load(Run(**given).engine, update)
    return str(told.value).replace(str(folder), "FOLDER")


def newest(folder: Path) -> Path:
    return folder / "update-00000002"


def truncate(folder: Path) -> None:
    os.truncate(newest(folder) / DATA, 1000)


def flip_bit(folder: Path) -> None:
    path = newest(folder) / DATA
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def flip_bit_of_manifest(folder: Path) -> None:
    path = newest(folder) / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"begin": 4', b'"begin": 5', 1))


def rewrite(**changes: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = newest(folder) / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return write


def make_foreign(folder: Path) -> None:
    shutil.rmtree(newest(folder))
    newest(folder).mkdir()
    torch.save({"weight": torch.ones(3)}, newest(folder) / "pytorch_model.bin")


SIZE = "has 1,000 bytes, and {size:,} were written."
CHECKSUM = "does not have the checksum that was written."
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, f"is damaged: {DATA} {SIZE}"),
    "a flipped bit": (flip_bit, f"is damaged: {DATA} {CHECKSUM}"),
    "a flipped bit in the manifest": (flip_bit_of_manifest, f"is damaged: its manifest.json {CHECKSUM}"),
    "half deleted": (lambda folder: (newest(folder) / DATA).unlink(), f"is damaged: {DATA} is missing."),
    "without manifest": (
        lambda folder: (newest(folder) / "manifest.json").unlink(),
        "is no checkpoint of halfstep: it holds no manifest.json.",
    ),
    "a manifest cut off": (
        lambda folder: os.truncate(newest(folder) / "manifest.json", 300),
        "is damaged: its manifest.json cannot be read.",
    ),
    "foreign": (make_foreign, "is no checkpoint of halfstep: it holds no manifest.json."),
    "of another kind": (
        rewrite(kind="something"),
        'is no checkpoint of halfstep: its manifest.json is not of the kind "halfstep checkpoint".',
    ),
    "newer": (
        rewrite(version=2),
        "is a checkpoint of version 2; this halfstep reads version 1. Use the halfstep that wrote it.",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_it_is_refused_by_name_and_the_one_before_is_offered(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path)
    size = (newest(folder) / DATA).stat().st_size
    damage, told = DAMAGES[name]
    damage(folder)
    offered = "The one before it, after update 1, is whole: ask for it (`update=1`, or `--from 1`)."
    assert refusal(folder) == f"FOLDER/update-00000002 {told.format(size=size)} {offered}"


def test_the_one_before_is_used_when_it_is_asked_for_and_goes_on_bitwise(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    truncate(folder)
    run = Run(seed=7)
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.load(run.engine, update=1)
        assert restored is not None
        assert restored.update == 1
        assert checkpoints.updates == [1]
    assert (folder / "left-update-00000002").is_dir()
    assert_same(run.finish().everything(), Run().finish().everything())


def test_when_no_whole_one_is_before_it_that_is_said(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    truncate(folder)
    (folder / "update-00000001" / DATA).unlink()
    assert refusal(folder).endswith("There is no whole one before it.")


def test_one_that_is_not_there(tmp_path: Path) -> None:
    assert refusal(saved(tmp_path), 7) == "FOLDER holds no checkpoint after update 7. There are: 1, 2."


def test_one_that_was_renamed(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "update-00000002").rename(folder / "update-00000009")
    assert refusal(folder) == "FOLDER/update-00000009 is a checkpoint after update 2: it was renamed."


def test_nothing_is_loaded_where_there_is_nothing(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "new") as checkpoints:
        assert checkpoints.load(Run().engine) is None


class Hostile:
    """A pickle that makes a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def test_a_hostile_pickle_is_not_executed(tmp_path: Path) -> None:
    folder, mark = saved(tmp_path / "run"), tmp_path / "executed"
    pickled = pickle.dumps(Hostile(mark))
    for name in (".metadata", "manifest.json.pkl", "__0_0.distcp", "optimizer.pt"):
        (newest(folder) / name).write_bytes(pickled)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.load(Run().engine) is not None
    path = newest(folder) / DATA
    path.write_bytes(pickled + bytes(path.stat().st_size - len(pickled)))
    assert refusal(folder, 2).startswith(f"FOLDER/update-00000002 is damaged: {DATA} {CHECKSUM}")
    (newest(folder) / "manifest.json").write_bytes(pickled)
    assert refusal(folder, 2).startswith("FOLDER/update-00000002 is damaged: its manifest.json cannot be read.")
    assert not mark.exists()
    pickle.loads(pickled)
    assert mark.exists(), "the pickle would have done it"


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    class Wider(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(5, 8)

    class More(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Linear(2, 2)

    class Less(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.last
            self.last = torch.nn.Identity()

    folder = saved(tmp_path)
    assert refusal(folder, net=Wider) == (
        "FOLDER/update-00000002 holds `model.first.weight` as torch.float32 of shape [8, 4], and here it is torch.float32 of "
        "shape [8, 5]."
    )
    assert refusal(folder, net=More) == "FOLDER/update-00000002 does not hold the model's `average.module.more.bias`."
    assert refusal(folder, net=Less) == "FOLDER/update-00000002 holds `average.module.last.bias`, which is not in the model."


def test_a_checkpoint_of_other_optimizers(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    assert refusal(folder, optimizer="two") == (
        "FOLDER/update-00000002 holds 1 optimizers and 1 schedulers, and the engine has 2 and 1."
    )


def test_a_checkpoint_of_other_parameter_groups(tmp_path: Path) -> None:
    folder, run = saved(tmp_path), Run()
    run.optimizers[0].param_groups[0]["params"].reverse()
    with Checkpoints(folder) as checkpoints, pytest.raises(CheckpointError) as told:
        checkpoints.load(run.engine)
    assert str(told.value) == (
        "The checkpoint's AdamW has other parameter groups than the engine's: the same parameters must stand in the same groups "
        "in the same order."
    )
