"""Accelerate: its guide to accumulation; where micro-batches differ, that guide's section on samples of variable size."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.commands.estimate import estimate_training_usage
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradScalerKwargs, calculate_maximum_sizes, find_executable_batch_size
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.conformance.job import (
    ESTIMATED,
    MANY,
    Job,
    Outcome,
    Parts,
    Saved,
    counted,
    in_parts,
    loader_of,
    mean_loss,
    parts_of,
    summed_loss,
)
from benchmarks.conformance.stacks.accelerator import as_on_a_gpu

LINKS = (
    "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation",
    "https://huggingface.co/docs/accelerate/usage_guides/checkpoint",
    "https://huggingface.co/docs/accelerate/usage_guides/model_size_estimator",
    "https://huggingface.co/docs/accelerate/package_reference/utilities",
)


def run(job: Job) -> Outcome:
    if job.estimates:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**ESTIMATED))
        told = estimate_training_usage(calculate_maximum_sizes(model)[0], "bfloat16")
        return Outcome(estimate=float(max(told.values())))  # the command's column "Training using Adam"
    if job.memory:
        found: Outcome = find_executable_batch_size(lambda samples: _train(job, None, samples), starting_batch_size=MANY)()
        return found
    return in_parts(job, _train)


class _Loop:
    """What the two ways to accumulate share."""

    def __init__(self, job: Job, parts: Parts, samples: int | None) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.job, self.parts = job, parts
        self.accelerator = Accelerator(
            mixed_precision="no" if job.precision == "fp32" else job.precision,
            gradient_accumulation_steps=job.accumulate,
            cpu=True,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
            kwargs_handlers=[GradScalerKwargs(init_scale=job.init_scale, growth_interval=job.growth_interval)],
        )
        as_on_a_gpu(self.accelerator, job)
        self.loader: Any = self.accelerator.prepare(loader_of(job, samples=samples))
        self.model, self.optimizer = self.accelerator.prepare(parts.model, parts.optimizer)
        self.scheduler = None if parts.scheduler is None else self.accelerator.prepare(parts.scheduler)
        self.plateau = None if parts.plateau is None else self.accelerator.prepare(parts.plateau)
        self.average = AveragedModel(parts.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if job.ema else None
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.scales: list[float] = []

    def step(self) -> None:
        """The end of a window, or what is to be called as if it were one."""
        if self.accelerator.sync_gradients:
            if self.job.clip_norm is not None:
                self.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.job.clip_norm)))
            if self.job.clip_value is not None:
                self.accelerator.clip_grad_value_(self.model.parameters(), self.job.clip_value)
            if self.accelerator.scaler is not None:
                self.scales.append(self.accelerator.scaler.get_scale())
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()
        if self.average is not None and self.accelerator.sync_gradients and not self.accelerator.optimizer_step_was_skipped:
            self.average.update_parameters(self.parts.model)

    def epoch_of_equal(self, loader: Any, stop: int | None) -> bool:
        """An epoch of micro-batches that count alike; whether it went to its end."""
        window: list[float] = []
        for batch in loader:
            with self.accelerator.accumulate(self.model):
                loss = mean_loss(self.model(batch["inputs"]), batch["labels"])
                self.accelerator.backward(loss)
                window.append(float(self.accelerator.gather(loss.detach()).mean()))
                self.step()
            if self.accelerator.sync_gradients:
                self.losses.append(sum(window) / len(window))
                window = []
                if len(self.losses) == stop:
                    return False
        return True

    def epoch_of_ragged(self, loader: Any, stop: int | None) -> bool:
        """An epoch of micro-batches that do not; whether it went to its end."""
        source, size, ranks = iter(loader), len(loader), self.accelerator.num_processes
        updates = math.ceil(size / self.job.accumulate)
        for number in range(updates):
            tail = size - number * self.job.accumulate if number == updates - 1 else self.job.accumulate
            window = [next(source) for _ in range(tail)]
            items = float(self.accelerator.gather(sum(counted(batch["labels"]) for batch in window)).sum())
            parts = []
            for index, batch in enumerate(window):
                with self.model.no_sync() if index < len(window) - 1 and ranks > 1 else nullcontext():
                    total = summed_loss(self.model(batch["inputs"]), batch["labels"])
                    loss = total * self.job.accumulate * ranks / items if items else total / 0
                    self.accelerator.backward(loss)
                    parts.append(loss.detach())
            self.step()
            self.losses.append(float(self.accelerator.gather(sum(parts)).sum()) / (ranks * self.job.accumulate))
            if len(self.losses) == stop:
                return False
        return True


def _train(job: Job, saved: Saved | None, samples: int | None = None) -> Outcome:
    parts = parts_of(job)
    loop = _Loop(job, parts, samples)
    begin, skip = 0, 0
    if saved and saved.resuming and job.stop_after:
        loop.accelerator.load_state(str(saved.folder))
        begin, skip = divmod(job.stop_after, job.updates_per_epoch)
    stop = job.stop_after if saved and not saved.resuming else None
    for epoch in range(begin, job.epochs):
        if hasattr(loop.loader, "set_epoch"):
            loop.loader.set_epoch(epoch)
        loader = loop.accelerator.skip_first_batches(loop.loader, skip * job.accumulate) if skip else loop.loader
        skip = 0
        whole = (loop.epoch_of_ragged if job.ragged else loop.epoch_of_equal)(loader, stop)
        if loop.plateau is not None:
            metric = torch.tensor(job.metrics[loop.accelerator.process_index][epoch])
            loop.plateau.step(float(loop.accelerator.gather_for_metrics(metric).mean()))
        if stop is not None and len(loop.losses) == stop:
            assert saved is not None
            loop.accelerator.save_state(str(saved.folder))
            break
        assert whole
    return parts.outcome(
        losses=loop.losses,
        norms=loop.norms or None,
        scales=loop.scales or None,
        averaged=None if loop.average is None else int(loop.average.n_averaged),
    )
