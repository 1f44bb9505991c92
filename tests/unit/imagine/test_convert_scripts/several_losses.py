# ruff: noqa
# fmt: off
"""Two losses of one forward pass, backpropagated one after the other, and one written in a single line."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(6)
loader = DataLoader(TensorDataset(torch.randn(32, 6), torch.randn(32, 2)), batch_size=8)
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _epoch in range(3):
	for x, y in loader:
		optimizer.zero_grad()
		out = model(x)
		first = mse_loss(out, y)
		first.backward(retain_graph=True)
		second = out.abs().mean()
		second.backward()
		mse_loss(model(x * 0.5), y).backward()
		optimizer.step()
		print("loss", first.item() + second.item())
