# ruff: noqa
# fmt: off
"""An optimizer chosen by a flag, a progress bar, a guard on the loss, a norm measured by hand, averaged weights."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def progress(iterable, total=None):
    for item in iterable:
        yield item


def build_optimizer(args, model):
    if args.opt == "sgd":
        return torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=args.lr)


def grad_norm(model):
    total = 0.0
    for p in model.parameters():
        if p.grad is not None:
            total += p.grad.detach().norm(2).item() ** 2
    return total ** 0.5


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt", default="sgd", choices=["sgd", "adamw"])
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--clip", type=float, default=0.5)
    args = parser.parse_args([])
    torch.manual_seed(9)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(TensorDataset(torch.randn(40, 5), torch.randn(40, 1)), batch_size=5, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 9), nn.SiLU(), nn.Linear(9, 1)).to(device)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = build_optimizer(args, model)
    for epoch in range(2):
        for x, y in progress(loader, total=len(loader)):
            x, y = x.to(device), y.to(device)
            pred = model(x)
            loss = nn.functional.mse_loss(pred, y)
            if not torch.isfinite(loss):
                print("bad loss")
                continue
            optimizer.zero_grad()
            loss.backward()
            norm = grad_norm(model)
            if args.clip > 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            averaged.update_parameters(model)
            seen = pred.detach().cpu().numpy()
            print("loss", loss.item())
            print("norm", norm, seen.shape)


if __name__ == "__main__":
    main()
