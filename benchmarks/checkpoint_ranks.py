"""A training for `benchmarks.checkpoint` under torchrun: goes on in FOLDER, saves after update STOP (0: trains to the end)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep import Checkpoints, Engine
from halfstep.distributed.env import world

GLOBAL_BATCH = 4

folder, stop, number = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
data = TensorDataset(torch.randn(22, 6), torch.arange(22).float())
seen: list[float] = []


def loss(called: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    """The sum of squares, and how many samples; notes which."""
    seen.extend(batch[1].tolist())
    return (called(batch[0]).squeeze(1) - batch[1] / 22).square().sum(), len(batch[0])


engine = Engine(model, optimizer, loss=loss, precision="fp32", accumulate=GLOBAL_BATCH // world().size, clip_norm=1.0)
with Checkpoints(folder / "checkpoints") as checkpoints, (folder / f"leg-{number}-{world().rank}.txt").open("w") as told:
    checkpoints.load(engine)
    for update in engine.updates(DataLoader(data, batch_size=1, shuffle=True), epochs=3):
        told.write(" ".join(map(str, [update.index, update.loss, *seen])) + "\n")
        seen.clear()
        if update.index == stop:
            checkpoints.save(engine)
            break
