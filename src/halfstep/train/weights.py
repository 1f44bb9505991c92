"""Weights that come a part at a time, into a model that lies whole here or in shards over the ranks.

A model is made without memory and is given its values afterwards: no process ever holds more of them than its own share and one
block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.config.choice import Choice
from halfstep.distributed.blocks import all_blocks
from halfstep.errors import ModelError

Named = Iterator[tuple[str, Tensor]]
INITIALIZED = "_is_hf_initialized"
"""The attribute by which transformers knows a tensor that is not to be drawn."""


def drawn(model: nn.Module, given: Collection[str] = frozenset()) -> Named:
    """Fresh values of a transformers model on the meta device, drawn on the CPU block by block from torch's generator.

    The order is that in which transformers initialises a whole model, so that the values depend on the generator alone.

    Args:
        model: used up: its tensors have memory only while they are drawn.
        given: names of tensors that are not wanted.

    Raises:
        ModelError: transformers leaves a value out.
    """
    from transformers.initialization import guard_torch_init_functions

    blocks = {id(block) for block in all_blocks(model)}
    inside = {id(part) for part in model.modules() if id(part) in blocks for part in part.modules()}
    names = {id(part): name for name, part in model.named_modules()}

    def prepare(parts: Iterable[nn.Module]) -> None:
        for part in parts:
            part.to_empty(device="cpu", recurse=False)
            for name, tensor in _own_tensors(part, names[id(part)]):
                if name in given:
                    setattr(tensor, INITIALIZED, True)
                elif tensor.is_floating_point():
                    tensor.fill_(float("nan"))

    def values(parts: Iterable[nn.Module]) -> Named:
        for part in parts:
            for name, tensor in _own_tensors(part, names[id(part)]):
                if name not in given:
                    yield name, _drawn_at_all(model, name, tensor)

    def visit(part: nn.Module, initialize: Callable[[nn.Module], object]) -> Named:
        if id(part) in blocks:
            prepare(part.modules())
        for child in part.children():
            yield from visit(child, getattr(child, "_initialize_weights", initialize))
        initialize(part)
        if id(part) in blocks:
            yield from values(part.modules())
            part.to("meta")

    outside = [part for part in model.modules() if id(part) not in inside]
    with torch.no_grad(), guard_torch_init_functions():
        prepare(outside)
        yield from visit(model, model._initialize_weights)  # type: ignore[arg-type]  # every model of transformers has it
        yield from values(outside)


def _own_tensors(part: nn.Module, prefix: str) -> Named:
    """Parameters and buffers of a module itself."""
    for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
        yield (f"{prefix}.{name}" if prefix else name), tensor


def _drawn_at_all(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() and bool(tensor.isnan().any()):
        raise ModelError(
            f"transformers gives `{name}` of {type(model).__name__} a value only where the model is made whole: it cannot be "
            'made in shards. Use `sharding = "ddp"`, or load it with `model.path`.'
        )
    return tensor


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Give a model of transformers on the meta device, whole or sharded, its memory without values; what was tied stays so."""
    model.to_empty(device=device)
    model.tie_weights()  # type: ignore[operator]  # as every model of transformers has it


@torch.no_grad()
def fill(model: nn.Module, values: Iterable[tuple[str, Tensor]]) -> None:
    """Give a model, whole or sharded, these values of its parameters and buffers; of tied ones the first name counts."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in values:
        target = held.get(name)
        if isinstance(target, DTensor):
            whole = value.to(target.dtype)
            part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(part.to_local())
        elif target is not None:
            target.copy_(value)


@torch.no_grad()
def load_shards(model: nn.Module, folder: str) -> tuple[set[str], Choice[str]]:
    """Read into a sharded model's shards what a folder of safetensors holds, each rank its own part; every rank calls it.

    Returns:
        The names of the tensors that were read, and what was found.

    Raises:
        ModelError: the folder's tensors are not the model's.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    if not any(Path(folder).glob("*.safetensors")):
        raise ModelError(
            f"`model.path`: {folder} holds no safetensors, which are what can be read into shards. Save the model anew with "
            'transformers\' `save_pretrained`, or use `sharding = "ddp"`.'
        )
    reader = HuggingFaceStorageReader(folder)
    stored = set(reader.read_metadata().state_dict_metadata)
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    found = stored & state.keys()
    read = {id(state[name]) for name in found}
    tied = {name for name, tensor in state.items() if id(tensor) in read}
    missing = sorted(state.keys() - found - tied)
    if missing and stored - found:
        raise ModelError(
            f"`model.path`: {folder} holds `{min(stored - found)}`, which {type(model).__name__} has not, and lacks "
            f'`{missing[0]}`: its tensors cannot be read into shards as they are. Use `sharding = "ddp"`, or save the model anew '
            "with transformers' `save_pretrained`."
        )
    load({name: state[name].detach() for name in sorted(found)}, storage_reader=reader)
    return found | tied, Choice(value=folder, reason=_told(missing))


def _told(missing: list[str]) -> str:
    if not missing:
        return "every tensor was in it; each rank read its shards"
    names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
    return f"{len(missing)} tensors were not in it and start at random: {names}"
