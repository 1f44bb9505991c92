# ruff: noqa
# fmt: off
"""The loop of the tutorials, with a schedule by the batch, a clip and a checkpoint."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = TensorDataset(torch.randn(54, 8), torch.randn(54, 1))
loader = DataLoader(data, batch_size=6, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(loader))
criterion = nn.MSELoss()

for epoch in range(3):
    total = 0.0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        # clear first
        optimizer.zero_grad()
        out = model(x)  # the forward pass
        loss = criterion(out, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        total += loss.item()
    print("loss", total / len(loader))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
