"""A model, a loss and data of one's own, for own_model.toml: how far the end of a double pendulum is from its hinge."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


def build(width: int) -> nn.Module:
    """`model.factory`: called with `model.config`."""
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """`model.loss`: the summed loss of a micro-batch and how many samples it was summed over."""
    angles, distances = batch
    return F.mse_loss(model(angles)[:, 0], distances, reduction="sum"), len(distances)


def data(samples: int) -> TensorDataset:
    """`data.factory`: called with `data.config`. A tenth is held out; a tuple of two data sets says which is."""
    angles = torch.rand(samples, 2, generator=torch.Generator().manual_seed(0)) * torch.pi
    ends = torch.stack([angles.cos().sum(1), angles.sin().sum(1)], dim=1)
    return TensorDataset(angles, ends.norm(dim=1))
