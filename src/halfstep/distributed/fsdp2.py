"""Models in shards, by FSDP2: each rank holds a part of every parameter, of its gradient and of its optimizer states.

Imported where a model is sharded, and not before: it takes torch a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep.config.options import Sharding
from halfstep.distributed.blocks import all_blocks
from halfstep.distributed.group import Group
from halfstep.errors import ModelError


class Shards:
    """A sharded model, run by all ranks in step: its forwards and backwards gather parameters and reduce gradients.

    Args:
        module: the sharded model.
        reduce_always: whether gradients are reduced after every micro-batch; else once a window, and whole until then.
    """

    def __init__(self, module: nn.Module, *, reduce_always: bool) -> None:
        assert isinstance(module, FSDPModule)
        self._module: FSDPModule = module
        self._reduce_always = reduce_always
        self._reduces = True

    def reduce(self, last: bool) -> None:
        """Say whether the next backward is the last of its window, after which nothing stays whole."""
        wanted = last or self._reduce_always
        if wanted != self._reduces:
            self._module.set_requires_gradient_sync(wanted)
            self._reduces = wanted


def shard(
    module: nn.Module, group: Group, device: torch.device, *, sharding: Sharding, dtype: torch.dtype | None, find_unused: bool
) -> FSDPModule:
    """Shard a model in place, block by block; every rank calls it.

    Tied parameters stay tied. A model on the meta device stays there, and is given memory afterwards.

    Args:
        module: equal on all ranks.
        group: all ranks.
        device: where it computes.
        sharding: `ZERO2` keeps parameters gathered from forward to backward, `ZERO3` gathers each block when it is used.
        dtype: what parameters are gathered and computed in; None for their own. Gradients are reduced in FP32.
        find_unused: whether ranks may use different parameters in one micro-batch.

    Raises:
        ModelError: the model has no blocks to be gathered one at a time.
    """
    blocks, is_zero3 = all_blocks(module), sharding is Sharding.ZERO3
    if is_zero3 and not blocks:
        raise ModelError(
            f'`sharding = "zero3"` gathers a model block by block, and {type(module).__name__} has no repeated blocks. '
            'Use "zero2", or shard it with `torch.distributed.fsdp.fully_shard` and give the engine the result.'
        )
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (group.size,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    }
    for piece in [*blocks, *(_own_pieces(module, blocks) if is_zero3 else [])]:
        fully_shard(piece, reshard_after_forward=is_zero3, **settings)
    sharded: FSDPModule = fully_shard(module, reshard_after_forward=False, **settings)
    sharded.set_reduce_scatter_unused_params(find_unused)
    return sharded


def _own_pieces(module: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Embedding and head of a model of transformers, which runs them as modules, unless they share weights or are in a block."""
    in_blocks = {id(part) for block in blocks for part in block.modules()}
    ends = [_end(module, name) for name in ("get_input_embeddings", "get_output_embeddings")]
    pieces = [piece for piece in ends if piece is not None and id(piece) not in in_blocks]
    held = [id(parameter) for piece in pieces for parameter in piece.parameters()]
    return pieces if len(set(held)) == len(held) else []


def _end(module: nn.Module, name: str) -> nn.Module | None:
    """What a model of transformers gives as its embedding or head; one of images has neither, and may say so by an error."""
    try:
        found: nn.Module | None = getattr(module, name, lambda: None)()
    except NotImplementedError:
        return None
    return found


def follow(optimizers: Iterable[Optimizer], before: dict[str, nn.Parameter], module: nn.Module) -> None:
    """Let the optimizers hold the parameters that sharding put in the place of those `before`.

    Raises:
        ModelError: an optimizer has states of whole parameters already.
    """
    after = dict(module.named_parameters())
    moved = {id(parameter): after[name] for name, parameter in before.items()}
    for optimizer in optimizers:
        if optimizer.state:
            raise ModelError(
                f"The {type(optimizer).__name__} has states already, of parameters that are sharded only now. Make the engine "
                "before the optimizer's first step, or before its states are loaded."
            )
        for held in optimizer.param_groups:
            held["params"] = [moved.get(id(parameter), parameter) for parameter in held["params"]]


def check_sharded(module: nn.Module, group: Group) -> None:
    """See that a model which was sharded by its owner is in as many shards as there are ranks, all of it.

    Raises:
        ModelError: it is not.
    """
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if not isinstance(parameter, DTensor):
            raise ModelError(
                f"The model is sharded, and its parameter `{name}` is not. Call `fully_shard` on the whole model too."
            )
        if parameter.device_mesh.size() != group.size or not all(isinstance(p, Shard) for p in parameter.placements):
            raise ModelError(
                f"The model's parameter `{name}` lies as {parameter.placements} on {parameter.device_mesh.size()} ranks; the "
                f"engine needs it in shards over all {group.size}."
            )


def refuse_wrapped(model: nn.Module, asked: str) -> None:
    """Refuse what FSDP2 does not go together with.

    Raises:
        ModelError: the model is in a wrapper of DDP or of FSDP1.
    """
    if isinstance(model, DistributedDataParallel):
        raise ModelError(f'`sharding = "{asked}"` was asked of a model that is wrapped in DDP. Give the engine the model itself.')
    if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
        raise ModelError(
            "The model is wrapped in FullyShardedDataParallel, FSDP's first version. Give the engine the model itself with "
            '`sharding = "zero3"`, or shard it with `torch.distributed.fsdp.fully_shard`.'
        )
