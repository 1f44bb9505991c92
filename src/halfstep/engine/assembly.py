"""The parts of an engine, put together before the first update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.config.options import Sharding, option
from halfstep.config.sharding import AUTO
from halfstep.distributed import Group, world
from halfstep.distributed.ddp import unwrap
from halfstep.distributed.layout import Layout, Wanted, decide, lay_out
from halfstep.engine.accumulation import Accumulation
from halfstep.engine.arithmetic import Arithmetic
from halfstep.engine.checks import check_average
from halfstep.engine.finish import Finish
from halfstep.engine.loss import LossFunction
from halfstep.engine.performer import Performer
from halfstep.engine.settlement import Averaged, Scheduler, Settlement, per_update
from halfstep.engine.sharded import ShardedAccumulation
from halfstep.engine.stopping import Stop
from halfstep.engine.window import Reference
from halfstep.errors import ModelError
from halfstep.measure.memory import free_bytes


def place(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    arithmetic: Arithmetic,
    group: Group,
    *,
    asked: Sharding | str,
    loss: LossFunction | None,
    ema: Any,
    find_unused: bool,
) -> Layout:
    """Wrap or shard the model as asked, or as memory wants it; every rank calls it.

    Raises:
        ConfigError: no sharding is called so.
        ModelError: the model or the average of its weights does not go together with that.
    """
    device = _device_of(model)
    wanted = Wanted(
        asked=asked if asked == AUTO else option(Sharding, asked, name="sharding", also=(AUTO,)),
        find_unused=find_unused,
        late_because=_why_late(loss, find_unused=find_unused),
        free_bytes=None if group.alone else _share_of_memory(device),
    )
    choice = decide(wanted, model, optimizers, group)
    if choice.value in (Sharding.NONE, Sharding.DDP):
        return lay_out(choice, wanted, model, optimizers, group, device, dtype=None)
    if ema is not None and any(not hasattr(p, "device_mesh") for p in ema.parameters()):
        raise ModelError(
            f'`ema` holds whole weights, and `sharding = "{choice.value}"` divides those of the model. Shard the model with '
            "`torch.distributed.fsdp.fully_shard` first and make the average from it."
        )
    arithmetic.begin(None, None)
    return lay_out(choice, wanted, model, optimizers, group, device, dtype=arithmetic.policy.autocast_dtype)


def assemble(
    layout: Layout,
    optimizers: Sequence[Optimizer],
    arithmetic: Arithmetic,
    group: Group,
    *,
    loss: LossFunction | None,
    schedulers: Sequence[Scheduler],
    ema: Averaged | None,
    clip_norm: float | None,
    clip_value: float | None,
    halve: bool,
    max_skips: int,
    evidence: Path,
) -> Performer:
    """What performs the updates of a model that lies so."""
    module, sharded = unwrap(layout.model), layout.shards is not None
    check_average(ema, module)
    device = _device_of(module)
    finish = Finish(optimizers, clip_norm=clip_norm, clip_value=clip_value, on_host=device.type == "cpu", sharded=sharded)
    reference = Reference(group, device)
    stop = Stop(module, loss, arithmetic, reference, device, evidence, group.rank)
    return Performer(
        loss=loss,
        arithmetic=arithmetic,
        accumulation=_accumulation(layout, loss, group, device, halve=halve),
        finish=finish,
        settlement=Settlement(module=module, schedulers=per_update(schedulers), ema=ema, max_skips=max_skips, stop=stop),
        reference=reference,
        group=group,
    )


def _accumulation(
    layout: Layout, loss: LossFunction | None, group: Group, device: torch.device, *, halve: bool
) -> Accumulation | ShardedAccumulation:
    if layout.shards is not None:
        return ShardedAccumulation(layout.model, layout.shards, loss, group, device)
    return Accumulation(layout, loss, group, device, halve=halve)


def _device_of(module: nn.Module) -> torch.device:
    return next(p.device for p in module.parameters() if p.requires_grad)


def _share_of_memory(device: torch.device) -> int | None:
    """The free memory of the device; of the machine's, the part of one of the ranks on it."""
    free = free_bytes(device)
    return free if free is None or device.type != "cpu" else free // world().local_size


def _why_late(loss: LossFunction | None, *, find_unused: bool) -> str | None:
    """Why gradients cannot be reduced while the last backward runs; None where they can."""
    if find_unused:
        return "parameters may be unused in some micro-batches"
    return "the caller runs the backwards, and any of them can be the last" if loss is None else None
