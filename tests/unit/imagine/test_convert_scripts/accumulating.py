# ruff: noqa
# fmt: off
"""Accumulation is there already, with its tail; the schedule moves with the update."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(5)
accumulation_steps = 4
loader = DataLoader(TensorDataset(torch.randn(63, 6), torch.randn(63, 1)), batch_size=7, shuffle=True)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=9)
optimizer.zero_grad()
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        window = min(accumulation_steps, len(loader) - i // accumulation_steps * accumulation_steps)
        loss = nn.functional.mse_loss(model(x), y) / window
        loss.backward()
        if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    print("loss", loss.item() * window)
