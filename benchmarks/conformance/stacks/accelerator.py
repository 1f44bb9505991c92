"""What Accelerate does with FP16 on a GPU, given to it on a CPU."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.conformance.job import Job


def as_on_a_gpu(accelerator: Any, job: Job) -> None:
    """Give an `Accelerator` the autocast and the scaler that it makes on a GPU; on a CPU it makes neither.

    Without this, all that concerns FP16 would read "not offered" for Accelerate and HF Trainer on a CPU, though both have it.
    """
    if job.precision == "fp16" and not job.plain_fp16:
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", job.init_scale, growth_interval=job.growth_interval)
