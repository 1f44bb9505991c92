"""Where parameters, gradients and optimizer states lie: whole on every rank, or in shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adafactor, Adagrad, Optimizer, RMSprop

from halfstep.config.choice import Choice
from halfstep.config.options import Sharding
from halfstep.config.sharding import EVERY_MICRO_BATCH, States, as_asked, choose, choose_reduction
from halfstep.distributed.ddp import ddp_in, replicate, unwrap
from halfstep.distributed.group import Group
from halfstep.distributed.shards import is_sharded, local

if TYPE_CHECKING:
    from halfstep.distributed.fsdp2 import Shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A model as it lies on the ranks.

    Attributes:
        model: what to call: the user's model, or its DDP wrapper.
        averaging: the DDP wrapper that averages gradients in the last backward of a window; None where there is none.
        shards: how a sharded model is run; None where it is whole.
        choices: sharding and when gradients are reduced, with reasons.
    """

    model: nn.Module
    averaging: DistributedDataParallel | None = None
    shards: Shards | None = None
    choices: dict[str, Choice[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What decides where a model lies.

    Attributes:
        asked: a sharding, or "auto".
        find_unused: whether ranks may use different parameters in one micro-batch.
        late_because: why DDP cannot reduce gradients during backward; None where it can.
        free_bytes: memory at hand for this rank beside what the model takes already; None where it is not known.
    """

    asked: Sharding | str
    find_unused: bool
    late_because: str | None
    free_bytes: int | None


def decide(wanted: Wanted, model: nn.Module, optimizers: Sequence[Optimizer], group: Group) -> Choice[Sharding]:
    """Where the model will lie; every rank calls it."""
    module = unwrap(model)
    if is_sharded(module):
        value = Sharding.ZERO2 if wanted.asked == Sharding.ZERO2 else Sharding.ZERO3
        return Choice(value=value, reason="the model was given in shards")
    if (choice := as_asked(wanted.asked, group.size)) is not None:
        return choice
    if ddp_in(model) is not None:
        return Choice(value=Sharding.DDP, reason="the model was given in DDP")
    return choose(states_of(module, optimizers), group.size, _at_hand(wanted, module, group))


def lay_out(
    choice: Choice[Sharding],
    wanted: Wanted,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    group: Group,
    device: torch.device,
    *,
    dtype: torch.dtype | None,
) -> Layout:
    """Lay the model out as was decided; every rank calls it.

    Args:
        dtype: what a sharded model computes in; None for the dtype of its parameters.

    Raises:
        ModelError: the model, or what it is wrapped in, does not suit that.
    """
    if choice.value not in (Sharding.ZERO2, Sharding.ZERO3):
        replica = replicate(model, group, device, late_because=wanted.late_because)
        choices: dict[str, Choice[str]] = {"sharding": _worded(choice), "gradient_sync": replica.choice}
        return Layout(model=replica.model, averaging=replica.averaging, choices=choices)
    from halfstep.distributed.fsdp2 import Shards, check_sharded, follow, refuse_wrapped, shard

    refuse_wrapped(model, choice.value.value)
    module, at_hand = unwrap(model), _at_hand(wanted, unwrap(model), group)
    sync = choose_reduction(states_of(module, optimizers), group.size, at_hand)
    if not is_sharded(module):
        before = dict(module.named_parameters())
        group.equalise(module)
        shard(module, group, device, sharding=choice.value, dtype=dtype, find_unused=wanted.find_unused)
        follow(optimizers, before, module)
    check_sharded(module, group)
    shards = Shards(module, reduce_always=sync.value == EVERY_MICRO_BATCH)
    return Layout(model=model, shards=shards, choices={"sharding": _worded(choice), "gradient_sync": sync})


def states_of(module: nn.Module, optimizers: Sequence[Optimizer]) -> States:
    """What training keeps of a model; of an optimizer that is not torch's, two values a parameter are assumed."""
    trained = [p for p in module.parameters() if p.requires_grad]
    kept = sum(
        _kept_values(optimizer, settings) * sum(p.nbytes for p in settings["params"])
        for optimizer in optimizers
        for settings in optimizer.param_groups
    )
    return States(parameters=sum(p.nbytes for p in module.parameters()), gradients=sum(p.nbytes for p in trained), optimizer=kept)


def _kept_values(optimizer: Optimizer, settings: dict[str, object]) -> int:
    """Values that an optimizer keeps for each element of a parameter."""
    if isinstance(optimizer, SGD):
        return int(bool(settings["momentum"]))
    if isinstance(optimizer, Adafactor):
        return 0
    return 1 if isinstance(optimizer, (Adagrad, RMSprop)) else 2 + bool(settings.get("amsgrad"))


def _at_hand(wanted: Wanted, module: nn.Module, group: Group) -> int | None:
    """What the rank that has least memory has for the model, what the model takes there already included."""
    held = sum(local(p).nbytes for p in module.parameters() if not p.is_meta)
    unknown, negative = group.max(float(wanted.free_bytes is None), -float((wanted.free_bytes or 0) + held))
    return None if unknown else int(-negative)


def _worded(choice: Choice[Sharding]) -> Choice[str]:
    return Choice(value=choice.value.value, reason=choice.reason)
