"""Goes on from its last checkpoint: `python restarted.py FOLDER KILL`. Rank 1 kills itself once, after update KILL."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep import Checkpoints, Engine

folder, kill = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
data = TensorDataset(torch.randn(30, 4), torch.randn(30, 1))


def loss(called: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return (called(batch[0]) - batch[1]).square().mean()


engine = Engine(model, optimizer, loss=loss, precision="fp32", accumulate=2)
with Checkpoints(folder / "checkpoints") as checkpoints:
    restored = checkpoints.load(engine)
    for update in engine.updates(DataLoader(data, batch_size=2, shuffle=True), epochs=2):
        checkpoints.save(engine, wait=update.index == kill)
        if update.index == kill and restored is None and engine.group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
told = f"{'' if restored is None else restored.update} {hashlib.sha256(weights.numpy().tobytes()).hexdigest()}"
(folder / f"rank-{engine.group.rank}.txt").write_text(told)
