"""Activation checkpointing on the repeated blocks of a model."""

from __future__ import annotations

from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint

from halfstep.config.choice import Choice
from halfstep.distributed.blocks import all_blocks
from halfstep.errors import ModelError


def checkpoint_blocks(module: nn.Module) -> Choice[str]:
    """Recompute each block's activations in backward instead of keeping them; names and types of modules stay.

    Raises:
        ModelError: no repeated block was found.
    """
    blocks = all_blocks(module)
    if not blocks:
        raise ModelError(
            f"`checkpoint_activations` looks for repeated blocks, and {type(module).__name__} has none. Put "
            "`torch.utils.checkpoint.checkpoint` around the parts of its forward that need much memory."
        )
    for block in blocks:
        checkpoint(block)
    kind = type(blocks[0]).__name__
    return Choice(value=f"{len(blocks)} x {kind}", reason="asked for: their activations are computed again in backward")
