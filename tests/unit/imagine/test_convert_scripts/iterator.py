# ruff: noqa
# fmt: off
"""A `while` loop over `iter(loader)`, with a function made inside of another."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(steps):
    torch.manual_seed(3)
    loader = DataLoader(TensorDataset(torch.randn(30, 4), torch.randn(30, 2)), batch_size=5)
    model = nn.Linear(4, 2)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss_of(batch):
        x, y = batch
        return ((model(x) - y) ** 2).mean()

    done = 0
    batches = iter(loader)
    while done < steps:
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        opt.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        opt.step()
        done += 1
        print("loss", loss.item())


if __name__ == "__main__":
    train(14)
