"""Goes on from its last checkpoint until somebody ends it, or as the only rank to update 30, and says each update's loss:
`torchrun ... endless.py FOLDER`. Other ranks are waited for 8 s, and then asked for 2 s where they are."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep import Checkpoints, Engine
from halfstep.distributed import whereabouts

whereabouts.ANSWER_S = 2.0
dist.init_process_group("gloo", timeout=timedelta(seconds=8))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
data = TensorDataset(torch.randn(30, 4), torch.randn(30, 1))


def loss(called: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    x, y = batch
    return (called(x) - y).square().sum(), len(x)


engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.01), loss=loss, precision="fp32")
with Checkpoints(Path(sys.argv[1])) as checkpoints:
    checkpoints.load(engine)
    for update in engine.updates(DataLoader(data, batch_size=6 // engine.group.size), epochs=None):
        print(f"rank {engine.group.rank} of {engine.group.size}, update {update.index}, loss {update.loss:.6f}", flush=True)
        if update.index == 20:
            checkpoints.save(engine, wait=True)
        if update.index == 30 and engine.group.alone:
            break
