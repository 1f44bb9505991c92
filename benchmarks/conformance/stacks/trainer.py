"""HF Trainer, with a loss that is told the number of tokens that count."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments, get_constant_schedule

from benchmarks.conformance.job import (
    MANY,
    Items,
    Job,
    NotOffered,
    Outcome,
    Parts,
    Saved,
    Stream,
    estimates_nothing,
    in_parts,
    joined,
    mean_loss,
    parts_of,
    summed_loss,
)
from benchmarks.conformance.stacks.accelerator import as_on_a_gpu

LINKS = (
    "https://huggingface.co/docs/transformers/trainer",
    "https://huggingface.co/docs/transformers/main_classes/trainer",
)


class Model(nn.Module):
    """The classifier with outputs as the trainer takes them."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.classifier = parts.model

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"logits": self.classifier(inputs)}


def loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """`compute_loss_func`."""
    if num_items_in_batch is None:
        return mean_loss(outputs["logits"], labels)
    return summed_loss(outputs["logits"], labels) / num_items_in_batch


class Watch(TrainerCallback):  # type: ignore[misc]  # of a library without types
    """Notes what is reported, and stops where the job is to be saved."""

    def __init__(self, stop: int | None) -> None:
        self.trainer: Any = None
        self.stop = stop
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.scales: list[float] = []
        self.epoch_loss = float("nan")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self.trainer.accelerator.scaler is not None:
            self.scales.append(self.trainer.accelerator.scaler.get_scale())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.stop:
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        told = logs or {}
        self.epoch_loss = told.get("train_loss", self.epoch_loss)
        if "loss" in told:
            self.losses.append(told["loss"])
        if "grad_norm" in told:
            self.norms.append(told["grad_norm"])


class Sequential(Trainer):  # type: ignore[misc]  # of a library without types
    """With the samples in their order."""

    metrics: Any = ()

    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return SequentialSampler(self.train_dataset)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Its own averages over the ranks as well; here over what the job says that each found."""
        epoch = round(self.state.epoch) - 1
        found = torch.tensor(self.metrics[self.accelerator.process_index][epoch])
        return {"eval_loss": float(self.accelerator.gather_for_metrics(found).mean())}


def run(job: Job) -> Outcome:
    estimates_nothing(job)
    if job.clip_value is not None:
        raise NotOffered("it clips by norm only")
    if job.ema:
        raise NotOffered("it averages no weights")
    return in_parts(job, _train)


def _train(job: Job, saved: Saved | None) -> Outcome:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    parts = parts_of(job)
    watch = Watch(job.stop_after if saved and not saved.resuming else None)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=str(saved.folder) if saved else scratch,
            per_device_train_batch_size=MANY if job.memory else 1,
            auto_find_batch_size=bool(job.memory),
            eval_strategy="epoch" if job.metrics else "no",
            metric_for_best_model="eval_loss" if job.metrics else None,
            greater_is_better=False if job.metrics else None,
            gradient_accumulation_steps=job.accumulate,
            num_train_epochs=job.epochs,
            max_grad_norm=job.clip_norm or 0.0,
            bf16=job.precision == "bf16",
            fp16=job.precision == "fp16",
            use_cpu=True,
            logging_steps=1,
            label_names=["labels"],
            remove_unused_columns=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            **({"max_steps": job.updates_per_epoch * job.epochs} if job.iterable else {}),
        )
        scheduler = parts.scheduler or parts.plateau or get_constant_schedule(parts.optimizer)
        data: Any = Items(job)
        if job.iterable:
            data = Stream(job, 0, 1)
        kind = Trainer if job.shuffle or job.iterable else Sequential
        data_to_judge = Items(job) if job.metrics else None
        trainer = kind(
            Model(parts),
            arguments,
            joined,
            data,
            data_to_judge,
            compute_loss_func=loss,
            optimizers=(parts.optimizer, scheduler),
            callbacks=[watch],
        )
        watch.trainer = trainer
        if job.metrics:
            trainer.metrics = job.metrics
        as_on_a_gpu(trainer.accelerator, job)
        trainer.train(resume_from_checkpoint=True if saved and saved.resuming else None)
    if dist.is_initialized():
        dist.barrier()
    return parts.outcome(
        losses=watch.losses,
        epoch_loss=watch.epoch_loss,
        norms=watch.norms or None,
        scales=watch.scales or None,
    )
