"""A training for `benchmarks.checkpoint` on ranks: goes on in a folder, and is saved after some update."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep import Checkpoints, Engine

GLOBAL_BATCH = 4


def go(rank: int, ranks: int, port: int, folder: Path, stop: int, number: int) -> None:
    """Train on one of so many ranks, up to a checkpoint after update `stop`, or to the end where that is 0."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is the benchmark's
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    data = TensorDataset(torch.randn(22, 6), torch.arange(22).float())
    seen: list[float] = []

    def loss(called: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        seen.extend(batch[1].tolist())
        return (called(batch[0]).squeeze(1) - batch[1] / 22).square().sum(), len(batch[0])

    engine = Engine(model, optimizer, loss=loss, precision="fp32", accumulate=GLOBAL_BATCH // ranks, clip_norm=1.0)
    with Checkpoints(folder / "checkpoints") as checkpoints, (folder / f"leg-{number}-{rank}.txt").open("w") as told:
        checkpoints.load(engine)
        for update in engine.updates(DataLoader(data, batch_size=1, shuffle=True), epochs=3):
            told.write(" ".join(map(str, [update.index, update.loss, *seen])) + "\n")
            seen.clear()
            if update.index == stop:
                checkpoints.save(engine)
                break
