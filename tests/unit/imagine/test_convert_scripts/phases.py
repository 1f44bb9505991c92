# ruff: noqa
# fmt: off
"""Two phases with the same helper, a model frozen at first; a schedule of the batch given as an argument; `del` and `assert`."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Dropout(0.0), nn.Linear(2 * d, d))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def run_epoch(net, batches, opt, sched=None):
    net.train()
    seen, total = 0, 0.0
    for inputs, labels in batches:
        logits = net(inputs)
        main_loss = F.cross_entropy(logits, labels)
        extra = 1e-2 * logits.square().mean()
        loss = main_loss + extra
        assert loss.ndim == 0
        opt.zero_grad()
        loss.backward()
        opt.step()
        if sched is not None:
            sched.step()
        total += main_loss.item() * len(labels)
        seen += len(labels)
        del logits
    print("loss", total / seen)


torch.manual_seed(10)
x = torch.randn(48, 6)
y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
batches = DataLoader(TensorDataset(x, y), batch_size=8)
net = nn.Sequential(Block(6), Block(6), nn.Linear(6, 3))
opt = torch.optim.AdamW(net.parameters(), lr=5e-3, weight_decay=0.1)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 5))
for _ in range(2):
    run_epoch(net, batches, opt, sched)
for group in opt.param_groups:
    group["weight_decay"] = 0.0
for _ in range(2):
    run_epoch(net, batches, opt)
