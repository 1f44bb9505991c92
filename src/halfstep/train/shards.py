"""A model that is nowhere whole until it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.config.choice import Choice
from halfstep.config.options import Precision, Sharding
from halfstep.config.run import Run
from halfstep.distributed import Group
from halfstep.precision.policy import policy_for
from halfstep.train.adapters import freeze, with_adapters
from halfstep.train.models import shell
from halfstep.train.opening import Opened, family_of
from halfstep.train.own import own_model
from halfstep.train.weights import drawn, fill, give_memory, load_shards


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
    model, source = _shell(opened, run), _shell(opened, run)
    if run.model.frozen is not None:
        choices["model.trained"] = freeze(model, run.model.frozen)
    if run.precision is Precision.BF16_PURE:
        model.to(torch.bfloat16)
    dtype = policy_for(run.precision, device).autocast_dtype
    shard(model, group, device, sharding=run.sharding, dtype=dtype, find_unused=False)
    give_memory(model, device)
    given: set[str] = set()
    if opened.inputs.path is not None:
        given, choices["model.weights"] = load_shards(model, opened.inputs.path)
    fill(model, drawn(source, given))
    return model.train(), choices


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
