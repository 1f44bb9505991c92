"""halfstep's own loop."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.conformance.job import ESTIMATED, Batch, Job, Outcome, Saved, counted, in_parts, loader_of, parts_of, summed_loss
from halfstep import Checkpoints, Engine, ScalerSettings
from halfstep.errors import RunStopped
from halfstep.plan.memory import Phase, memory_bill
from halfstep.plan.model_facts import from_config
from halfstep.plan.recipe import Recipe
from halfstep.train.averaging import averaged

LINKS = ("README.md", "docs/checkpoints.md", "docs/plan.md")


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum over the tokens that count, and how many they are."""
    return summed_loss(model(batch["inputs"]), batch["labels"]), counted(batch["labels"])


def run(job: Job) -> Outcome:
    if job.estimates:
        bill = memory_bill(from_config(ESTIMATED, "gpt2"), Recipe(micro_batch=1, sequence=8)).phases[Phase.STEP]
        return Outcome(estimate=bill["parameters"] + bill["gradients"] + bill["optimizer states"])
    return in_parts(job, _train)


def _train(job: Job, saved: Saved | None) -> Outcome:
    parts = parts_of(job)
    average = averaged(parts.model, 0.9) if job.ema else None
    updates: list[Any] = []
    stopped = ""
    with ExitStack() as open_until_here:
        engine = Engine(
            parts.model,
            parts.optimizer,
            loss=loss,
            scheduler=parts.scheduler or parts.plateau,
            precision=job.precision,
            accumulate=job.accumulate,
            clip_norm=job.clip_norm,
            clip_value=job.clip_value,
            ema=average,
            sharding="ddp",
            scaler=ScalerSettings(init_scale=job.init_scale, growth_interval=job.growth_interval),
            evidence=open_until_here.enter_context(tempfile.TemporaryDirectory()),
        )
        checkpoints = open_until_here.enter_context(Checkpoints(saved.folder)) if saved else None
        if checkpoints and saved and saved.resuming:
            checkpoints.load(engine)
        rank = dist.get_rank() if job.ranks > 1 else 0
        try:
            for update in engine.updates(loader_of(job, rank=rank, ranks=job.ranks), epochs=job.epochs):
                updates.append(update)
                if parts.plateau is not None and update.index % job.updates_per_epoch == 0:
                    engine.plateau(job.metrics[rank][update.index // job.updates_per_epoch - 1])
                if checkpoints and saved and not saved.resuming and update.index == job.stop_after:
                    checkpoints.save(engine, wait=True)
                    break
        except RunStopped as error:
            stopped = str(error)
        engine.settle() if not stopped else None
    last = updates[-job.updates_per_epoch :]
    counts = sum(update.weight for update in last)
    return parts.outcome(
        losses=[update.loss for update in updates],
        epoch_loss=sum(update.loss * update.weight for update in last) / counts if counts else None,
        norms=[update.grad_norm for update in updates],
        scales=[update.scale for update in updates],
        averaged=None if average is None else int(average.n_averaged),
        stopped=stopped,
    )
