"""What a checkpoint holds of a run, by name.

::

    model.NAME                      parameters
    average.NAME                    parameters of the averaged weights
    optimizer.I.NAME.KEY            what optimizer I keeps of a parameter
    rank.R.model.NAME               buffers, which may differ between ranks
    rank.R.average.NAME             buffers of the averaged weights
    rank.R.state                    everything else, as JSON: counts, ledger, loss scale, place in the data, random generators,
                                    learning rates, schedulers, and what the caller adds

A parameter that several names share is kept once. Where every rank has all of a tensor, each writes its share of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from halfstep.checkpoint.manifest import Manifest
from halfstep.checkpoint.plain import decode, encode
from halfstep.checkpoint.storage import load
from halfstep.checkpoint.tensor_file import DTYPES
from halfstep.engine import Engine
from halfstep.errors import CheckpointError, ModelError

VERSION = 1
Tensors = dict[str, torch.Tensor]


def tensors_of(engine: Engine, extra: Any) -> Tensors:
    """What this rank writes; every rank calls it, between two updates.

    Raises:
        ModelError: something has a state that a checkpoint cannot keep.
    """
    shared, own = model_tensors(engine)
    small: dict[str, Any] = {"version": VERSION, "engine": engine.state_dict(), "optimizers": []}
    for number, optimizer in enumerate(engine.optimizers):
        names = names_of(engine, optimizer)
        tensors, table = _optimizer(optimizer, names)
        shared |= {f"optimizer.{number}.{name}": tensor for name, tensor in tensors.items()}
        small["optimizers"].append(table)
    small["schedulers"] = [encode(_state_of(scheduler), type(scheduler).__name__) for scheduler in engine.schedulers]
    small["extra"] = encode(extra, "`extra`")
    own["state"] = torch.frombuffer(bytearray(json.dumps(small).encode()), dtype=torch.uint8)
    rank, ranks = engine.group.rank, engine.group.size
    return {**_share(shared, rank, ranks), **{f"rank.{rank}.{name}": tensor for name, tensor in own.items()}}


def restore(engine: Engine, folder: Path, manifest: Manifest) -> Any:
    """Put everything back; every rank calls it.

    Returns:
        What the caller added.

    Raises:
        CheckpointError: the checkpoint is not of this model, or of another version.
        ConfigError: the engine was asked for another precision.
    """
    rank = engine.group.rank % manifest.ranks
    small = _small(folder, manifest, rank)
    if small["version"] != VERSION:
        raise CheckpointError(f"{folder} holds a state of version {small['version']}; this halfstep reads version {VERSION}.")
    engine.load_state_dict(small["engine"])
    shared, own = model_tensors(engine)
    targets = {**{name: tensor.detach() for name, tensor in shared.items()}, **_of_rank(own, rank)}
    _check(folder, manifest, targets, rank)
    if len(small["optimizers"]) != len(engine.optimizers) or len(small["schedulers"]) != len(engine.schedulers):
        raise CheckpointError(
            f"{folder} holds {len(small['optimizers'])} optimizers and {len(small['schedulers'])} schedulers, and the engine has "
            f"{len(engine.optimizers)} and {len(engine.schedulers)}."
        )
    for number, (optimizer, table) in enumerate(zip(engine.optimizers, small["optimizers"], strict=True)):
        made = _load_optimizer(optimizer, names_of(engine, optimizer), table, manifest, f"optimizer.{number}", engine.device)
        targets |= made
    load(folder, manifest, targets)
    for scheduler, state in zip(engine.schedulers, small["schedulers"], strict=True):
        scheduler.load_state_dict(decode(state, engine.device))
    return decode(small["extra"], engine.device)


def restore_module(module: nn.Module, folder: Path, manifest: Manifest, *, averaged: bool) -> None:
    """Put saved weights into a model by itself, or the averaged ones into their average, whatever layout they were saved in.

    Raises:
        CheckpointError: the checkpoint is not of this model.
    """
    prefix = "average" if averaged else "model"
    parameters, buffers = _named(module, prefix)
    targets = {**{name: tensor.detach() for name, tensor in parameters.items()}, **_of_rank(buffers, 0)}
    missing = sorted(targets.keys() - manifest.tensors.keys())
    if missing:
        raise CheckpointError(f"{folder} does not hold the model's `{missing[0]}`.")
    load(folder, manifest, targets)


def model_tensors(engine: Engine) -> tuple[Tensors, Tensors]:
    """Parameters and buffers of the model and its average; parameters are the same on all ranks, or sharded over them."""
    parameters, buffers = _named(engine.module, "model")
    if engine.ema is not None:
        if not isinstance(engine.ema, nn.Module):
            raise ModelError(f"The averaged weights are a {type(engine.ema).__name__}, which is no module: they cannot be saved.")
        more = _named(engine.ema, "average")
        parameters, buffers = parameters | more[0], buffers | more[1]
    return parameters, buffers


def _named(module: nn.Module, prefix: str) -> tuple[Tensors, Tensors]:
    parameters: Tensors = {}
    buffers: Tensors = {}
    seen: set[int] = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(f"`{name}` of the model is a {type(value).__name__}, which a checkpoint cannot keep.")
        if id(value) not in seen:
            seen.add(id(value))
            (parameters if isinstance(value, nn.Parameter) else buffers)[f"{prefix}.{name}"] = value
    return parameters, buffers


def names_of(engine: Engine, optimizer: Optimizer) -> dict[torch.Tensor, str]:
    """The names of an optimizer's parameters."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    return {parameter: names[parameter] for group in optimizer.param_groups for parameter in group["params"]}


def _optimizer(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> tuple[Tensors, dict[str, Any]]:
    """The large tensors of an optimizer, and everything else that it keeps."""
    where = type(optimizer).__name__
    tensors: Tensors = {}
    kept: dict[str, dict[str, Any]] = {}
    for parameter, name in names.items():
        small = kept[name] = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and (value.numel() > 1 or value.shape == parameter.shape):
                tensors[f"{name}.{key}"] = value
                small[key] = {"stored": f"{name}.{key}", "on_host": value.device.type == "cpu"}
            else:
                small[key] = encode(value, where)
    groups = [
        {"names": [names[parameter] for parameter in group["params"]], "settings": encode(_settings(group), where)}
        for group in optimizer.param_groups
    ]
    return tensors, {"groups": groups, "state": kept}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _load_optimizer(
    optimizer: Optimizer,
    names: Mapping[torch.Tensor, str],
    table: dict[str, Any],
    manifest: Manifest,
    prefix: str,
    device: torch.device,
) -> Tensors:
    """Put an optimizer's small state back, and make room for its large tensors, by their names in the checkpoint."""
    ours = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    if ours != [group["names"] for group in table["groups"]]:
        raise CheckpointError(
            f"The checkpoint's {type(optimizer).__name__} has other parameter groups than the engine's: the same parameters must "
            "stand in the same groups in the same order."
        )
    for group, saved in zip(optimizer.param_groups, table["groups"], strict=True):
        group.update(decode(saved["settings"], device))
    room: Tensors = {}
    optimizer.state.clear()
    for parameter, name in names.items():
        for key, value in table["state"][name].items():
            if isinstance(value, dict) and "stored" in value:
                stored = f"{prefix}.{value['stored']}"
                entry = manifest.tensors[stored]
                place = torch.device("cpu") if value["on_host"] else device
                room[stored] = made = _room(parameter, entry.shape, DTYPES[entry.dtype], place)
                optimizer.state[parameter][key] = made
            else:
                optimizer.state[parameter][key] = decode(value, device)
    return room


def _room(parameter: torch.Tensor, shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor laid out and sharded as its parameter, where it has the same shape."""
    if list(parameter.shape) == list(shape):
        return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def _state_of(scheduler: Any) -> dict[str, Any]:
    if not hasattr(scheduler, "state_dict"):
        raise ModelError(
            f"The scheduler {type(scheduler).__name__} has no `state_dict`, so that a run with it cannot be resumed."
        )
    state: dict[str, Any] = scheduler.state_dict()
    return state


def _share(tensors: Tensors, rank: int, ranks: int) -> Tensors:
    """This rank's part of what all have, about as many bytes for each; of sharded tensors all, for each has its own part."""
    sizes = [0] * ranks
    mine: Tensors = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        if isinstance(tensor, DTensor):
            mine[name] = tensor
            continue
        least = sizes.index(min(sizes))
        sizes[least] += tensor.nbytes
        if least == rank:
            mine[name] = tensor
    return mine


def _of_rank(tensors: Tensors, rank: int) -> Tensors:
    return {f"rank.{rank}.{name}": tensor for name, tensor in tensors.items()}


def _small(folder: Path, manifest: Manifest, rank: int) -> dict[str, Any]:
    name = f"rank.{rank}.state"
    room = torch.empty(tuple(manifest.tensors[name].shape), dtype=torch.uint8)
    load(folder, manifest, {name: room})
    table: dict[str, Any] = json.loads(room.numpy().tobytes())
    return table


def _check(folder: Path, manifest: Manifest, targets: Tensors, rank: int) -> None:
    """See that the checkpoint is of this model."""
    prefixes = ("model.", "average.", f"rank.{rank}.model.", f"rank.{rank}.average.")
    saved = {name for name in manifest.tensors if name.startswith(prefixes)}
    for names, what in ((saved - targets.keys(), "which is not in the model"), (targets.keys() - saved, "")):
        if names:
            name = sorted(names)[0].removeprefix(f"rank.{rank}.").removeprefix("model.")
            raise CheckpointError(
                f"{folder} holds `{name}`, {what}." if what else f"{folder} does not hold the model's `{name}`."
            )
    for name, tensor in targets.items():
        stored = manifest.tensors[name]
        if list(stored.shape) != list(tensor.shape) or DTYPES[stored.dtype] != tensor.dtype:
            raise CheckpointError(
                f"{folder} holds `{name}` as {DTYPES[stored.dtype]} of shape {list(stored.shape)}, and here it is "
                f"{tensor.dtype} of shape {list(tensor.shape)}."
            )
