"""The models that are trained in the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]


def tiny(device: torch.device) -> tuple[nn.Module, list[Batch]]:
    """Eight linear layers of 32 and a window of four micro-batches of 16: nothing but overhead."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)]).to(device)
    return model, [(torch.randn(16, 32, device=device), torch.randn(16, 32, device=device)) for _ in range(4)]


def mean_square(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of the tiny model."""
    return functional.mse_loss(model(batch[0]), batch[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a GPT; these have 12.9 million parameters."""

    layers: int = 7
    width: int = 384
    heads: int = 6
    vocabulary: int = 1024
    context: int = 128


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to what came in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        fed: Tensor = self.down(functional.gelu(self.up(self.norm_2(x))))
        return x + fed


class Gpt(nn.Module):
    """A GPT with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(shape.vocabulary, shape.width), nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.token.weight)


LARGER = Shape(layers=12, width=512, heads=8, vocabulary=8192)
"""42.1 million parameters."""


def gpt(
    device: torch.device, *, micro_batch: int = 4, window: int = 4, shape: Shape | None = None
) -> tuple[nn.Module, list[Batch]]:
    """The GPT and a window of its micro-batches."""
    torch.manual_seed(0)
    shape = shape or Shape()
    tokens = torch.randint(shape.vocabulary, (window, micro_batch, shape.context + 1), device=device)
    return Gpt(shape).to(device), [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens]


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of the GPT."""
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
