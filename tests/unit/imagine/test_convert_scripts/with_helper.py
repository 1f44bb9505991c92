# ruff: noqa
# fmt: off
"""The loss and its nested function live in a module beside the script."""

import torch
from helper_module import make_loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(8)
loader = DataLoader(TensorDataset(torch.randn(36, 5), torch.randn(36, 5)), batch_size=6)
model = nn.Linear(5, 5)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
compute = make_loss(model, weight=0.1)

for epoch in range(2):
    for batch in loader:
        loss = compute(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("loss", loss.item())
