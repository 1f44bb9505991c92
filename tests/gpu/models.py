"""A small model on a GPU, ragged data for it, and the loop that one would write by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

WIDTH, CLASSES, IGNORED = 64, 32, -100


def small_model(device: torch.device, blocks: int = 2) -> nn.Sequential:
    """Blocks of two linear layers with a normalisation, and a head."""
    torch.manual_seed(0)

    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    return nn.Sequential(nn.Sequential(*(block() for _ in range(blocks))), nn.Linear(WIDTH, CLASSES)).to(device)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-3, fused=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """Inputs and labels, some of them masked; what the loss is multiplied by, to make gradients overflow."""

    x: Tensor
    labels: Tensor
    factor: float = 1.0


def ragged(device: torch.device, num_micro_batches: int, seed: int = 1) -> list[Labelled]:
    """Micro-batches of which about a third of the labels is masked."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(num_micro_batches):
        size = 16 + 8 * (number % 3)
        labels = torch.randint(0, CLASSES, (size,), generator=generator)
        labels[torch.rand(size, generator=generator) < 0.3] = IGNORED
        made.append(Labelled(x=torch.randn(size, WIDTH, generator=generator).to(device), labels=labels.to(device)))
    return made


def on_device(model: nn.Module, batch: Labelled) -> tuple[Tensor, Tensor]:
    """Summed loss and the number of labels, which stays on the device."""
    loss = F.cross_entropy(model(batch.x).float(), batch.labels, ignore_index=IGNORED, reduction="sum")
    return loss * batch.factor, (batch.labels != IGNORED).sum()


def on_host(model: nn.Module, batch: Labelled) -> tuple[Tensor, int]:
    """Summed loss over everything, and a number that the host knows."""
    loss = F.cross_entropy(model(batch.x).float(), batch.labels.clamp(min=0), reduction="sum")
    return loss * batch.factor, len(batch.labels)


def mean(model: nn.Module, batch: Labelled) -> Tensor:
    """A mean, which counts as one."""
    return F.cross_entropy(model(batch.x).float(), batch.labels.clamp(min=0)) * batch.factor


@dataclass(slots=True, kw_only=True)
class ByHand:
    """Clear, accumulate under autocast and scaler, unscale, clip, step, update."""

    model: nn.Module
    optimizer: Optimizer
    dtype: torch.dtype | None
    scaler: GradScaler
    clip_norm: float | None = None

    def update(self, window: Sequence[Labelled]) -> float:
        """One update, and its mean loss."""
        self.optimizer.zero_grad()
        count = sum(int((batch.labels != IGNORED).sum()) for batch in window)
        mean_loss = 0.0
        for batch in window:
            with torch.autocast("cuda", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
                total, _ = on_device(self.model, batch)
            self.scaler.scale(total / count).backward()
            mean_loss += float(total.detach()) / count
        if self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return mean_loss


def flat(model: nn.Module) -> Tensor:
    """All parameters in one vector, copied."""
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def distance(ours: nn.Module, theirs: nn.Module, start: Tensor) -> float:
    """How far apart two trained models are, relative to how far training moved them."""
    moved = (flat(theirs) - start).norm()
    assert moved > 0
    return float((flat(ours) - flat(theirs)).norm() / moved)
