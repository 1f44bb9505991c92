"""Weights that come a part at a time, into a model that lies whole here or in shards over the ranks.

A model is made without memory and is given its values afterwards: no process ever holds more of them than its own share and one
block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """Give a model, whole or sharded, these values of its parameters and buffers; of tied ones the first name counts.

    What adapters stand beside is known by its name before there were any, too.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    held: dict[str, list[Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        for known in {name, plain_name(name)}:
            held.setdefault(known, []).append(tensor)
    for name, value in values:
        for target in held.get(name, ()):
            if isinstance(target, DTensor):
                whole = value.to(target.dtype)
                part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
                target.to_local().copy_(part.to_local())
            else:
                target.copy_(value)


def plain_name(name: str) -> str:
    """What a tensor was called before there were adapters; of a part that is trained whole beside them, both copies."""
    for word in (".base_layer.", ".original_module.", ".modules_to_save.default."):
        name = name.replace(word, ".")
    return name.removeprefix("base_model.model.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a folder of safetensors holds of a model.

    Attributes:
        read: names of the tensors that are read.
        given: those, and the names of what is tied to them.
        fresh: names of the others, which start at random.
    """

    read: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()
    fresh: tuple[str, ...] = ()

    def choice(self, folder: str) -> Choice[str]:
        """The folder, and what was found in it."""
        return Choice(value=folder, reason=_told(self.fresh))


def stored_in(folder: str, model: nn.Module) -> Stored:
    """What a folder holds of a model, which may be without memory.

    Raises:
        ModelError: the folder's tensors are not the model's.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    if not any(Path(folder).glob("*.safetensors")):
        raise ModelError(
            f"`model.path`: {folder} holds no safetensors, which are what can be read into shards. Save the model anew with "
            'transformers\' `save_pretrained`, or use `sharding = "ddp"`.'
        )
    stored = set(HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata)
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    found = stored & state.keys()
    read = {id(state[name]) for name in found}
    given = {name for name, tensor in state.items() if id(tensor) in read}
    fresh = sorted(state.keys() - given)
    if fresh and stored - found:
        raise ModelError(
            f"`model.path`: {folder} holds `{min(stored - found)}`, which {type(model).__name__} has not, and lacks "
            f'`{fresh[0]}`: its tensors cannot be read into shards as they are. Use `sharding = "ddp"`, or save the model anew '
            "with transformers' `save_pretrained`."
        )
    return Stored(read=frozenset(found), given=frozenset(given), fresh=tuple(fresh))


@torch.no_grad()
def read_shards(folder: str, tensors: Mapping[str, Tensor]) -> None:
    """Read from a folder of safetensors into a sharded model's tensors, each rank its own part; every rank calls it."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load({name: tensor.detach() for name, tensor in sorted(tensors.items())}, storage_reader=HuggingFaceStorageReader(folder))


def _told(missing: Sequence[str]) -> str:
    if not missing:
        return "every tensor was in it; each rank read its shards"
    names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
    return f"{len(missing)} tensors were not in it and start at random: {names}"
