"""Turns a resolved run into objects. The only file that does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from halfstep.config.choice import Choice
from halfstep.config.options import OptimizerName, Precision, SchedulerName, Tail
from halfstep.config.run import OptimizerRun, Resolved, Run, SchedulerRun
from halfstep.distributed import Group
from halfstep.engine import Engine
from halfstep.precision.select import select_precision
from halfstep.train.averaging import averaged
from halfstep.train.corpus import Tokens
from halfstep.train.courses import warmup_stable_decay
from halfstep.train.evaluate import HeldOut
from halfstep.train.head import causal_loss, choose_chunk
from halfstep.train.models import load_model, new_model
from halfstep.train.opening import Opened
from halfstep.train.order import RankBatches
from halfstep.train.windows import Batch, Windows, as_it_is

ParameterGroup = dict[str, Any]


def build_model(opened: Opened, run: Run, device: torch.device) -> tuple[nn.Module, dict[str, Choice[Any]]]:
    """The model in FP32 on the device, and what was decided on the way.

    Fresh weights are drawn on the CPU from the run's seed, so that they do not depend on device or rank.
    """
    torch.manual_seed(run.run.seed)
    choices: dict[str, Choice[Any]] = {}
    if opened.inputs.path is None:
        model = new_model(opened.model_config, run.model.attention.value)
    else:
        model, choices["model.weights"] = load_model(opened.inputs.path, opened.model_config, run.model.attention.value)
    return model.to(device).train(), choices


def measure_precision(model: nn.Module, tokens: Tokens, run: Run, group: Group, device: torch.device) -> Choice[Precision]:
    """The precision that is fastest for the model's own forward and backward here, as rank 0 found it.

    Every rank must call it.
    """
    micro_batch = Windows(tokens, run.data.sequence_length).__getitems__(range(run.batch.micro))
    on_device = {key: value.to(device) for key, value in micro_batch.items()}
    loss = causal_loss(run.model.loss_chunk, run.model.label_smoothing)
    return select_precision(model, loss, on_device, device, group_broadcast=group.from_first)


def try_loss(model: nn.Module, run: Run, asked: int | None) -> Choice[int]:
    """How many tokens' logits are computed at a time, tried on the model itself.

    Raises:
        ModelError: chunks were asked for, and the model cannot do without its logits.
    """
    return choose_chunk(model, micro_tokens=run.batch.micro * run.data.sequence_length, asked=asked)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
    """Trainable parameters in two groups: matrices, which decay, and norms and biases, which do not."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if parameter.dim() >= 2]
    others = [parameter for parameter in trainable if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, settings: OptimizerRun) -> tuple[torch.optim.Optimizer, Choice[bool]]:
    """The optimizer, and whether it is one fused kernel."""
    groups = parameter_groups(model, settings.weight_decay)
    make, keywords = _constructor(settings)
    if settings.name is OptimizerName.ADAFACTOR:
        return make(groups, **keywords), Choice(value=False, reason="torch's Adafactor has no fused kernel")
    try:
        return make(groups, **keywords, fused=True), Choice(value=True, reason="one kernel reads each value once")
    except RuntimeError as error:
        return make(groups, **keywords), Choice(value=False, reason=str(error))


def _constructor(settings: OptimizerRun) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    kind: dict[OptimizerName, Callable[..., torch.optim.Optimizer]] = {
        OptimizerName.ADAMW: torch.optim.AdamW,
        OptimizerName.ADAM: torch.optim.Adam,
        OptimizerName.SGD: torch.optim.SGD,
        OptimizerName.ADAFACTOR: torch.optim.Adafactor,
    }
    keywords = {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "eps": settings.eps,
        "momentum": settings.momentum,
    }
    return kind[settings.name], {name: value for name, value in keywords.items() if value is not None}


def build_scheduler(optimizer: torch.optim.Optimizer, settings: SchedulerRun, planned: int | None) -> LambdaLR:
    """A scheduler that counts applied updates."""
    return LambdaLR(optimizer, course(settings, planned))


def course(settings: SchedulerRun, planned: int | None) -> Callable[[int], float]:
    """The share of the learning rate by the number of updates applied before.

    It rises in even steps to 1 over the warm-up, then goes to `final_share` at the last planned update and stays there.
    """

    def share(applied: int) -> float:
        if applied < settings.warmup_updates:
            return (applied + 1) / (settings.warmup_updates + 1)
        if planned is None or settings.name is SchedulerName.CONSTANT:
            return 1.0
        if settings.decay_updates is not None:
            return warmup_stable_decay(
                applied,
                warmup=settings.warmup_updates,
                decay=settings.decay_updates,
                planned=planned,
                final_share=settings.final_share,
            )
        span = max(1, planned - 1 - settings.warmup_updates)
        way = min(1.0, (applied - settings.warmup_updates) / span)
        fall = way if settings.name is SchedulerName.LINEAR else (1 - math.cos(math.pi * way)) / 2
        return 1.0 - fall * (1.0 - settings.final_share)

    return share


def build_average(model: nn.Module, run: Run) -> AveragedModel | None:
    """The averaged weights; `None` where none are kept."""
    return averaged(model, run.optimizer.ema_decay) if run.optimizer.ema_decay else None


def build_engine(model: nn.Module, resolved: Resolved, average: AveragedModel | None) -> tuple[Engine, dict[str, Choice[Any]]]:
    """The engine over the model, and what was decided on the way."""
    run = resolved.run
    optimizer, fused = build_optimizer(model, run.optimizer)
    engine = Engine(
        model,
        optimizer,
        loss=causal_loss(run.model.loss_chunk, run.model.label_smoothing),
        scheduler=build_scheduler(optimizer, run.scheduler, resolved.planned_updates),
        precision=run.precision,
        accumulate=run.accumulate,
        clip_norm=run.optimizer.clip_norm or None,
        clip_value=run.optimizer.clip_value or None,
        ema=average,
        tail=run.batch.tail,
        checkpoint_activations=run.model.checkpoint_activations,
        evidence=Path(run.run.folder) / "evidence",
    )
    return engine, {"optimizer.fused": fused}


def build_loader(tokens: Tokens, run: Run, group: Group, device: torch.device) -> DataLoader[Batch]:
    """The micro-batches of this rank, in the order that the seed gives."""
    windows = Windows(tokens, run.data.sequence_length)
    batches = RankBatches(
        len(windows),
        global_batch=run.batch.global_,
        micro=run.batch.micro,
        seed=run.run.seed,
        rank=group.rank,
        ranks=group.size,
        drop_tail=run.batch.tail is Tail.DROP,
    )
    return _loader(windows, batches, device)


def build_held_out(opened: Opened, run: Run, group: Group, engine: Engine) -> HeldOut | None:
    """The held-out text, this rank's share of it cut into micro-batches; `None` where it is not looked at."""
    tokens = opened.held_out_tokens
    if run.evaluation.every_updates == 0 or len(tokens) < 2:
        return None
    windows = Windows(tokens, run.data.sequence_length)
    mine = range(group.rank, len(windows), group.size)
    pieces = [mine[start : start + run.batch.micro] for start in range(0, len(mine), run.batch.micro)]
    return HeldOut(
        batches=_loader(windows, pieces, engine.device),
        num_tokens=len(tokens) - 1,
        num_bytes=opened.data.evaluation_bytes,
        loss=causal_loss(run.model.loss_chunk),
        device=engine.device,
        autocast=engine.autocast,
        group=group,
    )


def _loader(windows: Windows, batches: Iterable[Any], device: torch.device) -> DataLoader[Batch]:
    """No workers: cutting a batch out of memory takes less time than handing it over."""
    return DataLoader(windows, batch_sampler=batches, collate_fn=as_it_is, pin_memory=device.type == "cuda")
