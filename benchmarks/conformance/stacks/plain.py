"""Plain PyTorch, with accumulation, clipping and scaler as its AMP examples have them, also where an epoch ends."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DistributedSampler

from benchmarks.conformance.job import (
    DTYPES,
    Items,
    Job,
    Outcome,
    Parts,
    Saved,
    epochs_saved,
    in_parts,
    loader_of,
    mean_loss,
    needs_a_finder,
    parts_of,
)

LINKS = (
    "https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
    "https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html",
    "https://docs.pytorch.org/tutorials/advanced/generic_join.html",
    "https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html",
)


def run(job: Job) -> Outcome:
    needs_a_finder(job)
    return in_parts(job, _train)


def _train(job: Job, saved: Saved | None) -> Outcome:
    parts = parts_of(job)
    model: nn.Module = DistributedDataParallel(parts.model) if job.ranks > 1 else parts.model
    if isinstance(model, DistributedDataParallel) and job.uneven:
        with model.join(divide_by_initial_world_size=False):
            told = _loop(job, saved, parts, model)
    else:
        told = _loop(job, saved, parts, model)
    return parts.outcome(**told)


def _loop(job: Job, saved: Saved | None, parts: Parts, model: nn.Module) -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", job.init_scale, growth_interval=job.growth_interval, enabled=job.precision == "fp16")
    average = AveragedModel(parts.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if job.ema else None
    loader, begin, losses, norms, scales = _loader(job), 0, [], [], []
    if saved and saved.resuming:
        begin = _load(saved, parts, scaler)
    for epoch in range(begin, job.epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        window: list[float] = []
        batches = list(loader)
        for index, batch in enumerate(batches):
            last = (index + 1) % job.accumulate == 0 or index + 1 == len(batches)
            with model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext():
                with torch.autocast("cpu", DTYPES[job.precision], enabled=job.precision != "fp32"):
                    loss = mean_loss(model(batch["inputs"]), batch["labels"])
                scaler.scale(loss / job.accumulate).backward()
            window.append(loss.item())
            if not last:
                continue
            scaler.unscale_(parts.optimizer)
            if job.clip_norm is not None:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)))
            if job.clip_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), job.clip_value)
            scales.append(scaler.get_scale())
            scaler.step(parts.optimizer)
            scaler.update()
            parts.optimizer.zero_grad()
            if parts.scheduler is not None:
                parts.scheduler.step()
            if average is not None:
                average.update_parameters(parts.model)
            losses.append(sum(window) / len(window))
            window = []
        if parts.plateau is not None:
            metric = torch.tensor(job.metrics[dist.get_rank()][epoch])
            dist.all_reduce(metric, dist.ReduceOp.SUM)
            parts.plateau.step(float(metric) / job.ranks)
        if saved and not saved.resuming and epoch + 1 == epochs_saved(job):
            _save(saved, parts, scaler, epoch + 1)
            break
    averaged = None if average is None else int(average.n_averaged)
    return {"losses": losses, "norms": norms or None, "scales": scales, "averaged": averaged}


def _loader(job: Job) -> Any:
    if job.ranks == 1:
        return loader_of(job)
    if job.iterable:
        return loader_of(job, rank=dist.get_rank(), ranks=job.ranks)
    if job.uneven:
        return loader_of(job, shuffle=False, sampler=range(dist.get_rank(), len(job.items), job.ranks))
    return loader_of(job, shuffle=False, sampler=DistributedSampler(Items(job), shuffle=job.shuffle))


def _save(saved: Saved, parts: Any, scaler: Any, epoch: int) -> None:
    state = {"epoch": epoch, "model": parts.model.state_dict(), "optimizer": parts.optimizer.state_dict()}
    state |= {"scaler": scaler.state_dict(), "scheduler": parts.scheduler and parts.scheduler.state_dict()}
    torch.save(state, saved.folder / "checkpoint.pt")


def _load(saved: Saved, parts: Any, scaler: Any) -> int:
    state = torch.load(saved.folder / "checkpoint.pt")
    parts.model.load_state_dict(state["model"])
    parts.optimizer.load_state_dict(state["optimizer"])
    scaler.load_state_dict(state["scaler"])
    if parts.scheduler is not None:
        parts.scheduler.load_state_dict(state["scheduler"])
    epoch: int = state["epoch"]
    return epoch
