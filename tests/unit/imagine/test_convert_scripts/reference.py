# ruff: noqa
# fmt: off
"""As the references of torchvision are written: a helper for an epoch, one for evaluation, flags, resuming."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, quiet=True):
    model.train()
    total = 0.0
    for i, (image, target) in enumerate(data_loader):
        image, target = image.to(device), target.to(device)
        output = model(image)
        loss = criterion(output, target)

        optimizer.zero_grad()
        loss.backward()
        if args.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()

        total += loss.item()
        if not quiet and i % 10 == 0:
            print("step", i)
    print("loss", total / len(data_loader))


def evaluate(model, criterion, data_loader, device):
    model.eval()
    total = 0.0
    with torch.inference_mode():
        for image, target in data_loader:
            image = image.to(device, non_blocking=True)
            target = target.to(device, non_blocking=True)
            output = model(image)
            total += criterion(output, target).item()
    print("eval", total / len(data_loader))


def main(args):
    torch.manual_seed(1)
    device = torch.device(args.device)
    points = torch.randn(70, 6)
    labels = (points.sum(1) > 0).long()
    data_loader = DataLoader(TensorDataset(points, labels), batch_size=args.batch_size, shuffle=True)
    data_loader_test = DataLoader(TensorDataset(points[:20], labels[:20]), batch_size=args.batch_size)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2))
    model.to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args)
        lr_scheduler.step()
        evaluate(model, criterion, data_loader_test, device=device)
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": lr_scheduler.state_dict(),
            "epoch": epoch,
        }
        torch.save(checkpoint, "checkpoint.pt")


def get_args_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", default=7, type=int)
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--lr", default=0.05, type=float)
    parser.add_argument("--clip-grad-norm", default=None, type=float)
    parser.add_argument("--resume", default="", type=str)
    return parser


if __name__ == "__main__":
    main(get_args_parser().parse_args([]))
