"""Lightning's Trainer, with automatic optimization."""

from __future__ import annotations

import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BatchSizeFinder, EMAWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import grad_norm
from torch.utils.data import DistributedSampler

from benchmarks.conformance.job import (
    OUT_OF_MEMORY,
    Batch,
    Items,
    Job,
    Outcome,
    Parts,
    Saved,
    counted,
    estimates_nothing,
    in_parts,
    loader_of,
    mean_loss,
    parts_of,
)

LINKS = (
    "https://lightning.ai/docs/pytorch/stable/common/optimization.html",
    "https://lightning.ai/docs/pytorch/stable/extensions/logging.html",
    "https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html",
    "https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html",
)


class Module(pl.LightningModule):
    """The job as a module, which notes what is reported."""

    def __init__(self, job: Job, parts: Parts, scaler: torch.amp.GradScaler | None, save: Saved | None) -> None:
        super().__init__()
        self.model, self.job, self.scaler, self.save = parts.model, job, scaler, save
        self._parts = parts
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.scales: list[float] = []
        self.epoch_loss = float("nan")
        self.batch_size = 2

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        loss = mean_loss(self.model(batch["inputs"]), batch["labels"])
        counts = int(counted(batch["labels"]))
        told = {"on_step": True, "on_epoch": True, "batch_size": counts, "sync_dist": self.job.ranks > 1}
        self.log("loss", loss, **told)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = self._parts.optimizer, self._parts.scheduler
        if self._parts.plateau is not None:
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self._parts.plateau, "monitor": "metric"}}
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(grad_norm(self.model, norm_type=2)["grad_2.0_norm_total"]))
        if self.scaler is not None:
            self.scales.append(self.scaler.get_scale())

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if (index + 1) % self.job.accumulate == 0 or self.trainer.is_last_batch:
            self.losses.append(float(self.trainer.callback_metrics["loss_step"]))
        if self.save and not self.save.resuming and self.trainer.global_step == self.job.stop_after:
            self.trainer.should_stop = True

    def train_dataloader(self) -> Any:
        """For the search, which sets `batch_size`."""
        return loader_of(self.job, samples=self.batch_size)

    def on_train_epoch_end(self) -> None:
        if self.job.metrics:
            self.log("metric", self.job.metrics[self.global_rank][self.current_epoch], sync_dist=True)
        self.epoch_loss = float(self.trainer.callback_metrics["loss_epoch"])


def run(job: Job) -> Outcome:
    estimates_nothing(job)
    return in_parts(job, _train)


def _train(job: Job, saved: Saved | None) -> Outcome:
    parts = parts_of(job)
    scaler = None
    given: dict[str, Any] = {"precision": {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[job.precision]}
    if job.precision == "fp16" and not job.plain_fp16:
        scaler = torch.amp.GradScaler("cpu", job.init_scale, growth_interval=job.growth_interval)
        given = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    if job.clip_norm is not None:
        given |= {"gradient_clip_val": job.clip_norm, "gradient_clip_algorithm": "norm"}
    if job.clip_value is not None:
        given |= {"gradient_clip_val": job.clip_value, "gradient_clip_algorithm": "value"}
    average = EMAWeightAveraging(decay=0.9) if job.ema else None
    finder = BatchSizeFinder(init_val=2) if job.memory else None
    scratch = tempfile.mkdtemp() if job.memory else None
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=job.ranks,
        strategy="ddp" if job.ranks > 1 else "auto",
        max_epochs=job.epochs,
        accumulate_grad_batches=job.accumulate,
        callbacks=[each for each in (average, finder) if each],
        default_root_dir=scratch,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        use_distributed_sampler=job.shuffle,  # its own sampler shuffles whether the loader does or not
        **given,
    )
    module = Module(job, parts, scaler, saved)
    checkpoint = str(saved.folder / "last.ckpt") if saved else None
    stopped = ""
    try:
        trainer.fit(module, None if job.memory else _loader(job), ckpt_path=checkpoint if saved and saved.resuming else None)
    except RuntimeError as error:
        if OUT_OF_MEMORY not in str(error):
            raise
        stopped = f"found {module.batch_size} samples a micro-batch, and training with them ran out of memory"
    if saved and not saved.resuming:
        trainer.save_checkpoint(str(checkpoint))
    inner = getattr(average, "_average_model", None)
    return parts.outcome(
        losses=module.losses,
        epoch_loss=module.epoch_loss,
        norms=module.norms,
        stopped=stopped,
        scales=module.scales or None,
        averaged=None if inner is None else int(inner.n_averaged),
    )


def _loader(job: Job) -> Any:
    if job.iterable:
        return loader_of(job, rank=dist.get_rank(), ranks=job.ranks)
    if job.ranks > 1 and not job.shuffle:
        return loader_of(job, sampler=DistributedSampler(Items(job), shuffle=False))
    return loader_of(job)
