"""A script as users write them: the same on one process and under torchrun. `python script.py FOLDER MODE`."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep import Engine

folder, mode = Path(sys.argv[1]), sys.argv[2]


def gloo_threads() -> list[str]:
    """Names of gloo's threads in this process, where the system tells (Linux)."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def report_threads() -> None:
    (folder / f"threads-of-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(gloo_threads()))


atexit.register(report_threads)  # before any of the engine's, and so called after them
if mode.startswith("own group"):
    dist.init_process_group("gloo")

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = TensorDataset(torch.randn(30, 4), torch.randn(30, 1))


def loss(called: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    x, y = batch
    if mode == "fail" and int(os.environ["RANK"]) == 1 and engine.ledger.applied == 3:
        raise ValueError("sample 17 has no label")
    return (called(x) - y).square().sum(), len(x)


world_size = int(os.environ.get("WORLD_SIZE", "1"))
engine = Engine(model, optimizer, loss=loss, precision="fp32", accumulate=4 // world_size, clip_norm=1.0)
losses = [update.loss for update in engine.updates(DataLoader(data, batch_size=2), epochs=2)]
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
found = {"losses": losses, "weights": weights.tolist(), "digest": hashlib.sha256(weights.numpy().tobytes()).hexdigest()}
(folder / f"rank-{engine.group.rank}-of-{engine.group.size}.json").write_text(json.dumps(found))

if mode == "own group, destroyed":
    dist.destroy_process_group()  # while the engine, and with it the DDP wrapper, are still there
