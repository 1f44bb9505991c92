"""Updates of small models, counted on fake tensors or run, in a process of their own.

`python -m benchmarks.planned_update WAY PLANS MODEL...` prints a line of JSON for each of the first PLANS plans
of each model. WAY is

- "memory": the resident set above what was held before the model was made, beside what was counted on fake tensors. The C library
  must be told to give freed memory back (`MALLOC_MMAP_THRESHOLD_=65536`), so that the resident set is what tensors hold.
- "time": seconds that one thread computed for each update, which other processes of the machine disturb little.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from halfstep.config.options import Precision
from halfstep.measure.clock import processor_s
from halfstep.measure.memory import memory_use, reset_peak
from halfstep.measure.traced_update import TracedJob, new_batch, new_model, new_optimizer, trace, update
from halfstep.plan.recipe import Checkpointing, Recipe

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 8192}
GATED = {**SHAPE, "intermediate_size": 1376}
POSITIONS = {"max_position_embeddings": 256}
GROUPED = {**GATED, "num_key_value_heads": 2}
MODELS: dict[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", **GATED, "num_key_value_heads": 8},
    "mistral": {"model_type": "mistral", **GROUPED},
    "qwen2": {"model_type": "qwen2", **GROUPED},
    "qwen3": {"model_type": "qwen3", **GROUPED, "head_dim": 64},
    "gemma": {"model_type": "gemma", **GATED, "num_key_value_heads": 1, "head_dim": 64},
    "gpt2": {"model_type": "gpt2", "n_embd": 512, "n_layer": 4, "n_head": 8, "vocab_size": 8192, "n_positions": 256},
    "opt": {"model_type": "opt", **SHAPE, **POSITIONS, "ffn_dim": 2048, "word_embed_proj_dim": 512},
    "gpt_neox": {"model_type": "gpt_neox", **SHAPE, **POSITIONS, "intermediate_size": 2048},
    "bert": {"model_type": "bert", **SHAPE, **POSITIONS, "intermediate_size": 2048},
    "resnet50": {"model_type": "resnet"},
}
PLANS = {
    "fp32": Recipe(micro_batch=4, sequence=128, precision=Precision.FP32),
    "fp32, checkpointed": Recipe(micro_batch=8, sequence=128, precision=Precision.FP32, checkpointing=Checkpointing.FULL),
    "bf16": Recipe(micro_batch=4, sequence=128, precision=Precision.BF16),
}
TIMED_UPDATES = 3


def plans_of(name: str) -> dict[str, Recipe]:
    """The three plans of a model; a convolutional network's second has twice the images instead of checkpoints."""
    if name != "resnet50":
        return PLANS
    images = {plan: replace(recipe, sequence=1, checkpointing=Checkpointing.NONE) for plan, recipe in PLANS.items()}
    return {plan.replace("checkpointed", "twice the images"): recipe for plan, recipe in images.items()}


def job_of(name: str, recipe: Recipe) -> TracedJob:
    return TracedJob(
        config=MODELS[name],
        precision=str(recipe.precision),
        micro_batch=recipe.micro_batch,
        sequence=recipe.sequence,
        checkpointing=str(recipe.checkpointing),
    )


class Real:
    """The same update as is traced, on real tensors."""

    def __init__(self, job: TracedJob) -> None:
        torch.manual_seed(0)
        self._job = job
        self._model = new_model(job)
        self._optimizer = new_optimizer(job, self._model)
        self._batch = new_batch(job, self._model)

    def __call__(self) -> None:
        update(self._job, self._model, self._optimizer, *self._batch)


def measured_memory(job: TracedJob) -> dict[str, float]:
    small = Real(replace(job, micro_batch=1))
    small()  # libraries take what they keep
    del small
    gc.collect()
    before = memory_use(CPU).allocated_bytes or 0
    reset_peak(CPU)
    real = Real(job)
    for _ in range(2):
        real()
    peak = memory_use(CPU).peak_allocated_bytes or 0
    return {"measured_bytes": peak - before, "traced_bytes": max(trace(job).phases.values())}


def measured_time(job: TracedJob) -> dict[str, list[float]]:
    real = Real(job)
    real()
    return {"seconds": [processor_s(real, CPU) for _ in range(TIMED_UPDATES)]}


WAYS = {"memory": measured_memory, "time": measured_time}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    way, plans, *models = sys.argv[1:]
    for model in models:
        for plan, recipe in list(plans_of(model).items())[: int(plans)]:
            print(json.dumps({"model": model, "plan": plan, **WAYS[way](job_of(model, recipe))}), flush=True)
