"""The repeated blocks of a model, and activation checkpointing on them."""

from __future__ import annotations

from collections import defaultdict

from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint

from halfstep.config.choice import Choice
from halfstep.errors import ModelError


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The layers of the longest run of children of one class: a transformer's blocks, a ResNet's stages.

    Leaves (a `Linear`, a `ReLU`) are no blocks. Empty where nothing repeats.
    """
    best: list[nn.Module] = []
    for parent in module.modules():
        by_class: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)
        for child in parent.children():
            if any(True for _ in child.children()):
                by_class[type(child)].append(child)
        best = max([best, *by_class.values()], key=len)
    return best if len(best) > 1 else []


def checkpoint_blocks(module: nn.Module) -> Choice[str]:
    """Recompute each block's activations in backward instead of keeping them; names and types of modules stay.

    Raises:
        ModelError: no repeated block was found.
    """
    blocks = repeated_blocks(module)
    if not blocks:
        raise ModelError(
            f"`checkpoint_activations` looks for repeated blocks, and {type(module).__name__} has none. Put "
            "`torch.utils.checkpoint.checkpoint` around the parts of its forward that need much memory."
        )
    for block in blocks:
        checkpoint(block)
    kind = type(blocks[0]).__name__
    return Choice(value=f"{len(blocks)} x {kind}", reason="asked for: their activations are computed again in backward")
