"""DeepSpeed: its getting-started loop, stage 0, with the user's own optimizer and scheduler handed over."""

from __future__ import annotations

import os
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DistributedSampler

from benchmarks.conformance.job import (
    Items,
    Job,
    NotOffered,
    Outcome,
    Saved,
    epochs_saved,
    in_parts,
    loader_of,
    mean_loss,
    needs_a_finder,
    parts_of,
)

LINKS = (
    "https://www.deepspeed.ai/getting-started/",
    "https://www.deepspeed.ai/docs/config-json/",
    "https://deepspeed.readthedocs.io/en/latest/model-checkpointing.html",
)
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # spares minutes of compiling; ranks then meet over gloo


def run(job: Job) -> Outcome:
    needs_a_finder(job)
    if job.precision == "fp16" and not job.plain_fp16:
        raise NotOffered("its FP16 does not run on a CPU")
    if job.clip_value is not None:
        raise NotOffered("it clips by norm only")
    return in_parts(job, _train)


def _engine(job: Job, parts: Any) -> Any:
    if not dist.is_initialized():
        os.environ.update(ALONE)
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": job.accumulate,
        "gradient_clipping": job.clip_norm or 0.0,
        "steps_per_print": 10**9,
    }
    config |= {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}} if job.precision == "bf16" else {}
    config |= {"fp16": {"enabled": True}} if job.precision == "fp16" else {}
    engine, *_ = deepspeed.initialize(
        model=parts.model, optimizer=parts.optimizer, lr_scheduler=parts.scheduler, config=config, dist_init_required=False
    )
    return engine


def _train(job: Job, saved: Saved | None) -> Outcome:
    parts = parts_of(job)
    engine = _engine(job, parts)
    average = AveragedModel(parts.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if job.ema else None
    begin, losses, norms, window = 0, [], [], []
    if saved and saved.resuming:
        _, state = engine.load_checkpoint(str(saved.folder), tag="last")
        begin = state["epoch"]
    loader = _loader(job)
    for epoch in range(begin, job.epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            loss = mean_loss(engine(batch["inputs"]), batch["labels"])
            engine.backward(loss)
            window.append(loss.item())
            ends = engine.is_gradient_accumulation_boundary()
            engine.step()
            if not ends:
                continue
            if engine.get_global_grad_norm() is not None:
                norms.append(float(engine.get_global_grad_norm()))
            if average is not None:
                average.update_parameters(parts.model)
            losses.append(sum(window) / len(window))
            window = []
        if parts.plateau is not None:
            metric = torch.tensor(job.metrics[dist.get_rank()][epoch])
            dist.all_reduce(metric)
            parts.plateau.step(float(metric) / job.ranks)
        if saved and not saved.resuming and epoch + 1 == epochs_saved(job):
            engine.save_checkpoint(str(saved.folder), tag="last", client_state={"epoch": epoch + 1})
            break
    averaged = None if average is None else int(average.n_averaged)
    return parts.outcome(losses=losses, norms=norms or None, averaged=averaged)


def _loader(job: Job) -> Any:
    if job.iterable or job.ranks == 1:
        return loader_of(job, rank=dist.get_rank(), ranks=job.ranks)
    return loader_of(job, shuffle=False, sampler=DistributedSampler(Items(job), shuffle=job.shuffle))
