"""Fabric: its guide to accumulation, with the loss divided and windows that end where they should."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.conformance.job import Job, Outcome, Saved, epochs_saved, in_parts, loader_of, mean_loss, needs_a_finder, parts_of

LINKS = (
    "https://lightning.ai/docs/fabric/stable/advanced/gradient_accumulation.html",
    "https://lightning.ai/docs/fabric/stable/guide/checkpoint/checkpoint.html",
)


def run(job: Job) -> Outcome:
    needs_a_finder(job)
    return in_parts(job, _train)


def _fabric(job: Job) -> tuple[Fabric, torch.amp.GradScaler | None]:
    scaler = None
    given: dict[str, Any] = {"precision": {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[job.precision]}
    if job.precision == "fp16" and not job.plain_fp16:
        scaler = torch.amp.GradScaler("cpu", job.init_scale, growth_interval=job.growth_interval)
        given = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    fabric = Fabric(accelerator="cpu", devices=job.ranks, strategy="ddp" if job.ranks > 1 else "auto", **given)
    fabric.launch()
    return fabric, scaler


def _train(job: Job, saved: Saved | None) -> Outcome:
    parts = parts_of(job)
    fabric, scaler = _fabric(job)
    model: Any
    model, optimizer = fabric.setup(parts.model, parts.optimizer)
    own = {"rank": dist.get_rank(), "ranks": job.ranks} if job.iterable and job.ranks > 1 else {}
    loader: Any = fabric.setup_dataloaders(loader_of(job, **own))
    average = AveragedModel(parts.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if job.ema else None
    losses: list[float] = []
    norms: list[float] = []
    scales: list[float] = []
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    state |= {} if parts.scheduler is None else {"scheduler": parts.scheduler}
    if saved and saved.resuming:
        fabric.load(saved.folder / "checkpoint.ckpt", state)
    begin: int = state["epoch"]
    for epoch in range(begin, job.epochs):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        window: list[float] = []
        size = len(list(loader)) if job.iterable else len(loader)
        for index, batch in enumerate(loader):
            last = (index + 1) % job.accumulate == 0 or index + 1 == size
            with fabric.no_backward_sync(model, enabled=not last):
                loss = mean_loss(model(batch["inputs"]), batch["labels"])
                fabric.backward(loss / job.accumulate)
            window.append(loss.item())
            if not last:
                continue
            if job.clip_norm is not None:
                norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=job.clip_norm)))
            if job.clip_value is not None:
                fabric.clip_gradients(model, optimizer, clip_val=job.clip_value)
            if scaler is not None:
                scales.append(scaler.get_scale())
            optimizer.step()
            optimizer.zero_grad()
            if parts.scheduler is not None:
                parts.scheduler.step()
            if average is not None:
                average.update_parameters(parts.model)
            losses.append(float(fabric.all_reduce(torch.tensor(sum(window) / len(window)), reduce_op="mean")))
            window = []
        if parts.plateau is not None:
            parts.plateau.step(float(fabric.all_reduce(torch.tensor(job.metrics[fabric.global_rank][epoch]), reduce_op="mean")))
        if saved and not saved.resuming and epoch + 1 == epochs_saved(job):
            fabric.save(saved.folder / "checkpoint.ckpt", {**state, "epoch": epoch + 1})
            break
    return parts.outcome(
        losses=losses,
        norms=norms or None,
        scales=scales or None,
        averaged=None if average is None else int(average.n_averaged),
    )
