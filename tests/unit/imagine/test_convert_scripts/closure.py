# ruff: noqa
# fmt: off
"""A step made by a function that returns a function; flags read from a name space."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_step(model, criterion, optimizer):
    def step(x, y):
        model.train()
        prediction = model(x)
        loss = criterion(prediction, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args([])
    torch.manual_seed(4)
    loader = DataLoader(TensorDataset(torch.randn(24, 3), torch.randn(24, 1)), batch_size=4)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    step = make_step(model, nn.L1Loss(), optimizer)
    for _ in range(args.epochs):
        for x, y in loader:
            print("loss", step(x, y))


if __name__ == "__main__":
    main()
