"""A model that is nowhere whole until it is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.config.choice import Choice
from halfstep.config.options import Precision, Sharding
from halfstep.config.run import Run
from halfstep.distributed import Group
from halfstep.precision.policy import policy_for
from halfstep.train.adapters import freeze, trained, with_adapters
from halfstep.train.models import shell
from halfstep.train.opening import Opened, family_of
from halfstep.train.own import own_model
from halfstep.train.weights import Named, Stored, drawn, fill, give_memory, plain_name, read_shards, stored_in


def is_divided(run: Run, group: Group) -> bool:
    """Whether each rank holds a shard of the model; one process holds all of it, even if it shows the run of several."""
    return run.sharding in (Sharding.ZERO2, Sharding.ZERO3) and not group.alone


def made_in_shards(opened: Opened, run: Run, device: torch.device, group: Group) -> tuple[nn.Module, dict[str, Choice[Any]]]:
    """This rank's shards of a model of transformers, and what was decided on the way; every rank calls it.

    Raises:
        ModelError: the model has no blocks, or its weights cannot be had in shards.
    """
    from halfstep.distributed.fsdp2 import shard  # takes torch a second

    choices: dict[str, Choice[Any]] = {}
    model, source, stored = _shell(opened, run), _shell(opened, run), Stored()
    if opened.inputs.path is not None:
        stored = stored_in(opened.inputs.path, source)
        choices["model.weights"] = stored.choice(opened.inputs.path)
    if run.lora is not None:
        with torch.random.fork_rng(devices=[]):
            model = with_adapters(model, run.lora, stored.fresh)
        choices["lora.trained"] = trained(model)
    elif run.model.frozen is not None:
        choices["model.trained"] = freeze(model, run.model.frozen)
    if run.precision is Precision.BF16_PURE:
        model.to(torch.bfloat16)
    dtype = policy_for(run.precision, device).autocast_dtype
    shard(model, group, device, sharding=run.sharding, dtype=dtype, find_unused=False)
    give_memory(model, device)
    held = {plain_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    if opened.inputs.path is not None:
        read_shards(opened.inputs.path, {name: held[name] for name in stored.read})
    fill(model, drawn(source, stored.given))
    if run.lora is not None:
        fill(model, _drawn_adapters(opened, run, stored.fresh))
    return model.train(), choices


def _drawn_adapters(opened: Opened, run: Run, fresh: Sequence[str]) -> Named:
    """Fresh values of the adapters alone, drawn on the CPU as for a whole model."""
    assert run.lora is not None
    model = _shell(opened, run)
    base = set(model.state_dict())
    for part in model.modules():
        for name, tensor in part.named_parameters(recurse=False):
            one = torch.zeros((), dtype=tensor.dtype)
            setattr(part, name, nn.Parameter(one.expand(tensor.shape)))  # has a size and takes no memory
    adapted = with_adapters(model, run.lora, fresh)
    return ((name, value) for name, value in adapted.named_parameters() if plain_name(name) not in base)


def whole_again(opened: Opened, run: Run, state: Mapping[str, Tensor]) -> nn.Module:
    """The model on the CPU with what its shards held, to be saved; tensors that no state holds are without values."""
    if opened.inputs.factory is not None:
        model = own_model(opened.inputs.factory, opened.inputs.config or {})
    else:
        model = _shell(opened, run)
        if run.lora is not None:
            model = with_adapters(model, run.lora, _trained_whole(state))
        give_memory(model, torch.device("cpu"))
    fill(model, state.items())
    return model


def _trained_whole(state: Mapping[str, Tensor]) -> list[str]:
    """Names, before there were adapters, of what is trained whole beside them."""
    parts = [name.partition(".modules_to_save.") for name in state]
    return [f"{before.removeprefix('base_model.model.')}.weight" for before, found, _ in parts if found]


def _shell(opened: Opened, run: Run) -> nn.Module:
    assert run.model.attention is not None
    return shell(opened.model_config, run.model.attention.value, family_of(opened.inputs))
