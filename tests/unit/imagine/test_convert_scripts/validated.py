# ruff: noqa
# fmt: off
"""Training and validation in one function, a schedule that waits for the metric, text of many lines in the loop."""

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, random_split


def build():
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(60, 4), torch.randn(60, 1))
    train_set, valid_set = random_split(data, [48, 12])
    return DataLoader(train_set, batch_size=8, shuffle=True, drop_last=True), DataLoader(valid_set, batch_size=12)


def fit(model, train_loader, valid_loader, optimizer, scheduler, epochs):
    loss_fn = nn.SmoothL1Loss()
    for epoch in range(epochs):
        model.train()
        running = 0.0
        for step, batch in enumerate(train_loader):
            inputs, targets = batch
            optimizer.zero_grad(set_to_none=True)
            predictions = model(inputs)
            report = f"""epoch {epoch}
  step {step}"""
            loss = loss_fn(predictions, targets)
            loss.backward()
            optimizer.step()
            running += loss.item()
            if not report.endswith(f"\n  step {step}"):
                raise ValueError(report)
        model.eval()
        with torch.no_grad():
            valid = sum(loss_fn(model(x), y).item() for x, y in valid_loader)
        scheduler.step(valid)
        print("loss", running / len(train_loader))
        print("eval", valid)


if __name__ == "__main__":
    train_loader, valid_loader = build()
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)
    fit(net, train_loader, valid_loader, opt, ReduceLROnPlateau(opt), epochs=3)
