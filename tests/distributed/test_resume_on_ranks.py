"""Several ranks save together and go on: bitwise with as many ranks, with the same samples in the same windows with others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from checkpoints.runs import assert_same
from distributed.ranks import Ended
from halfstep import Checkpoints, Engine
from halfstep.checkpoint.manifest import read_manifest
from halfstep.errors import UsageError

Both = Callable[..., list[Any]]
GLOBAL_BATCH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.inner(x)))


class Net(nn.Module):
    """Blocks for FSDP2, dropout and statistics that differ from rank to rank."""

    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6) if draws else nn.Identity()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 1)
        if not draws:
            self.apply(lambda part: part.__setattr__("p", 0.0) if isinstance(part, nn.Dropout) else None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def go(folder: Path, stop: int | None, sharding: str, draws: bool, seed: int, num_samples: int = 22) -> dict[str, Any]:
    """Go on from what is in the folder, and save after update `stop`; what was seen, and how it ended."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(seed)
    model = Net(draws=draws)
    torch.manual_seed(seed + (dist.get_rank() if dist.is_initialized() else 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    windows: list[list[float]] = []

    def loss(called: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        windows[-1] += batch[1].tolist()
        return (called(batch[0]).squeeze(1) - batch[1] / 22).square().sum(), len(batch[0])

    micro = 2 if draws else 1
    accumulate = GLOBAL_BATCH // (micro * ranks)
    engine = Engine(model, optimizer, loss=loss, precision="fp32", sharding=sharding, accumulate=accumulate, clip_norm=1.0)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(num_samples, 6, generator=generator), torch.arange(num_samples).float())
    losses = []
    with Checkpoints(folder) as checkpoints:
        checkpoints.load(engine)
        windows.append([])
        for update in engine.updates(DataLoader(data, batch_size=micro, shuffle=True), epochs=3):
            losses.append(update.loss)
            if update.index == stop:
                checkpoints.save(engine)
                break
            windows.append([])
    kept = {k: v for k, v in engine.state_dict().items() if k != "precision_reason"}
    return {
        "windows": windows[: len(losses)],
        "losses": losses,
        "engine": kept,
        "state": [local(value) for value in [*model.state_dict().values(), *moments(optimizer)]],
    }


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def local(value: Tensor) -> Tensor:
    return value.to_local().clone() if isinstance(value, DTensor) else value.clone()


@pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3"])
def test_as_many_ranks_go_on_bitwise(sharding: str, both: Both, tmp_path: Path) -> None:
    whole = both(go, tmp_path / "whole", None, sharding, True, 0, 24)
    both(go, tmp_path / "run", 4, sharding, True, 0, 24)
    both(go, tmp_path / "run", 7, sharding, True, 5, 24)
    ended = both(go, tmp_path / "run", None, sharding, True, 9, 24)
    for rank in (0, 1):
        for name in ("engine", "state"):
            assert_same(ended[rank][name], whole[rank][name])
        assert ended[rank]["windows"] == whole[rank]["windows"][7:]
        assert ended[rank]["losses"] == whole[rank]["losses"][7:]


@pytest.mark.parametrize("stop", [5, 6, 11])
def test_a_rank_whose_data_end_before_the_others_goes_on_bitwise(stop: int, both: Both, tmp_path: Path) -> None:
    """Of 21 samples rank 0 has 11, in six windows, and rank 1 has 10, in five."""
    whole = both(go, tmp_path / "whole", None, "ddp", False, 0, 21)
    both(go, tmp_path / "run", stop, "ddp", False, 0, 21)
    ended = both(go, tmp_path / "run", None, "ddp", False, 9, 21)
    for rank in (0, 1):
        assert_same(ended[rank]["state"], whole[rank]["state"])
        assert ended[rank]["windows"] == whole[rank]["windows"][stop:]


def test_each_rank_writes_its_share_and_no_tensor_is_there_twice(both: Both, tmp_path: Path) -> None:
    both(go, tmp_path, 1, "ddp", False, 0)
    manifest = read_manifest(tmp_path / "update-00000001")
    assert manifest.ranks == 2
    files = [{chunk.file for chunk in stored.chunks} for stored in manifest.tensors.values()]
    assert all(len(names) == 1 for names in files)
    sizes = [file.size for file in manifest.files.values()]
    assert max(sizes) < 2 * min(sizes)


@pytest.mark.parametrize("sharding", ["ddp", "zero3"])
def test_two_ranks_one_and_two_again_see_the_same_windows(sharding: str, both: Both, tmp_path: Path) -> None:
    whole = both(go, tmp_path / "whole", None, sharding, False, 0)
    first = both(go, tmp_path / "run", 4, sharding, False, 0)
    alone = go(tmp_path / "run", 9, "none", False, 3)
    last = both(go, tmp_path / "run", None, sharding, False, 7)
    windows = [sorted(a + b) for a, b in zip(*(rank["windows"] for rank in whole), strict=True)]
    seen = [
        *(sorted(a + b) for a, b in zip(*(rank["windows"] for rank in first), strict=True)),
        *map(sorted, alone["windows"]),
        *(sorted(a + b) for a, b in zip(*(rank["windows"] for rank in last), strict=True)),
    ]
    assert seen == windows
    assert len(windows) == 18
    losses = [*first[0]["losses"], *alone["losses"], *last[0]["losses"]]
    assert losses == pytest.approx(whole[0]["losses"], rel=1e-5)


def fills_up(folder: Path) -> str:
    import os

    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32", sharding="ddp")
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if engine.group.rank == 1:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    os.fsync = full
    try:
        Checkpoints(folder).save(engine, wait=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.fsync = fsync
    return "saved"


def test_a_rank_whose_disk_is_full_is_told_on_all(both: Both, tmp_path: Path) -> None:
    told = both(fills_up, tmp_path)
    sentence = f"{tmp_path}/update-00000000 cannot be written: the disk is full. What was saved before is still there."
    assert told == [f"UsageError: {sentence}"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def saves_apart(folder: Path) -> str:
    model = nn.Linear(2, 2)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32", sharding="ddp")
    place = Path(f"{folder}{engine.group.rank}")
    with pytest.raises(UsageError) as told:
        Checkpoints(place).save(engine, wait=True)
    return str(told.value).replace(str(place), "FOLDER")


def test_hosts_that_do_not_see_the_same_folder_are_told(both: Both, tmp_path: Path) -> None:
    first, _ = both(saves_apart, tmp_path / "of rank ")
    assert first == (
        "FOLDER/update-00000000 cannot be written: rank-00001.safetensors, which another rank has written, is not there. All "
        "hosts must see the same folder."
    )
    assert [path.name for path in (tmp_path / "of rank 0").iterdir()] == ["lock"]


def loads_damaged(folder: Path) -> None:
    model = Net(draws=False)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), fused=True), precision="fp32", sharding="ddp")
    with Checkpoints(folder) as checkpoints:
        checkpoints.load(engine)


def test_a_damaged_checkpoint_is_refused_on_all_ranks(both: Both, started: Callable[..., list[Ended]], tmp_path: Path) -> None:
    both(go, tmp_path, 1, "ddp", False, 0)
    (tmp_path / "update-00000001" / "rank-00001.safetensors").unlink()
    ends = started(loads_damaged, tmp_path)
    sentence = f"{tmp_path}/update-00000001 is damaged: rank-00001.safetensors is missing. There is no whole one before it."
    assert [end.message for end in ends] == [sentence, sentence]
