"""What is measured, in words and numbers, before anything is: so that the figures can be read by someone else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.config.load import load
from halfstep.config.options import OptimizerName, Precision
from halfstep.config.run import Run
from halfstep.config.tasks import ALL_LINEAR
from halfstep.measure.hardware import describe
from halfstep.measure.memory import free_bytes
from halfstep.plan.recipe import Adapter, Loss, Optimizer
from halfstep.precision.select import available, candidates
from halfstep.train.job import prepare
from halfstep.train.opening import device_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What the rows have in common.

    Attributes:
        device: type of the device, as torch names it.
        machine: its name and software, in words.
        parameters: of the model.
        micro: samples of a micro-batch, as the configuration has it.
        accumulate: micro-batches of an update, likewise.
        sequence: tokens of a sample; None where there are none.
        unit: what is counted.
        conditions: what else a reader must know, by name.
        unavailable: precisions that this device cannot train in, with the reason.
        model_config: the configuration of the model, for predictions; empty where it has none.
        recipe: what else memory depends on, by the planner's names for it.
        processes: ranks, as the configuration has them.
        learning_rate: as the configuration has it; None where it was not asked.
        native: precisions that "auto" may choose here, FP32 first.
        at_hand_bytes: memory that nobody used before the model was made, for each rank; None where that is not told.
    """

    device: str
    machine: str
    parameters: int
    micro: int
    accumulate: int
    sequence: int | None
    unit: str
    conditions: Mapping[str, str]
    unavailable: Mapping[str, str]
    model_config: Mapping[str, Any]
    recipe: Mapping[str, Any]
    processes: int = 1
    learning_rate: float | None = None
    native: Sequence[str] = (str(Precision.FP32),)
    at_hand_bytes: int | None = None


def describe_subject(config: str | None, settings: Sequence[str]) -> Subject:
    """Prepare the run once, in FP32, and tell what it is."""
    written = load(None if config is None else Path(config), [*settings, "precision=fp32", "limits.updates=1"])
    at_hand = free_bytes(device_of(written))
    job = prepare(written, started=datetime.now())
    run, machine = job.run, describe(job.device)
    cannot = {str(p): verdict.reason for p, verdict in available(job.device).items() if not verdict.value}
    model_config = getattr(job.model, "config", None)
    return Subject(
        device=job.device.type,
        machine=f"{machine.name} ({machine.backend}), torch {version('torch')}, {torch.get_num_threads()} threads",
        parameters=sum(p.numel() for p in job.model.parameters()),
        micro=run.batch.micro,
        accumulate=run.accumulate,
        sequence=run.data.sequence_length,
        unit=run.model.task.unit,
        conditions={
            "sequence": "unknown" if run.data.sequence_length is None else f"{run.data.sequence_length} tokens",
            "packing": {None: "one stream of text", True: "packed", False: "padded"}[run.data.packing],
            "attention": str(run.model.attention),
            "activation checkpointing": "on" if run.model.checkpoint_activations else "off",
            "optimizer": f"{run.optimizer.name}, states in {_states(run)}",
            "loss": f"{run.model.loss_chunk} tokens at a time" if run.model.loss_chunk else "all logits at once",
            "parameters": f"FP32; BF16 in rows of bf16-pure; {_trained(job.model)}",
            "tf32": "on where the GPU has it" if job.device.type == "cuda" else f"{job.device.type} has none",
        },
        unavailable=cannot,
        model_config=model_config.to_dict() if model_config is not None else {},
        recipe=_recipe(run, job.model),
        processes=run.processes,
        learning_rate=run.optimizer.learning_rate,
        native=[str(precision) for precision in candidates(job.device)],
        at_hand_bytes=at_hand // run.processes if at_hand is not None and job.device.type == "cpu" else at_hand,
    )


def _states(run: Run) -> str:
    return "8 bits" if run.optimizer.name is OptimizerName.ADAMW_8BIT else "the dtype of the parameters"


def _trained(model: nn.Module) -> str:
    some, every = trained_parameters(model), sum(p.numel() for p in model.parameters())
    return "all are trained" if some == every else f"{some:,} of {every:,} are trained"


def trained_parameters(model: nn.Module) -> int:
    """How many of its numbers are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _recipe(run: Run, model: nn.Module) -> dict[str, Any]:
    """Fields of `halfstep.plan.recipe.Recipe` that are the same in every row, as JSON types."""
    some, every = trained_parameters(model), sum(p.numel() for p in model.parameters())
    adapted = (
        {
            "adapter": str(Adapter.LORA),
            "adapts_all": list(run.lora.targets) == [ALL_LINEAR],
            "adapter_dropout": run.lora.dropout > 0,
        }
        if run.lora is not None
        else {}
    )
    return {
        "optimizer": str(_optimizer(run)),
        "attention": None if run.model.attention is None else str(run.model.attention),
        "loss": str(Loss.CHUNKED if run.model.loss_chunk else Loss.WHOLE),
        "loss_chunk": run.model.loss_chunk or None,
        "labels_samples": run.model.task.has_classes,
        "trainable": None if some == every else some,
        **adapted,
    }


def _optimizer(run: Run) -> Optimizer:
    """As the planner names what keeps the same states."""
    name = run.optimizer.name
    if name is OptimizerName.SGD and run.optimizer.momentum:
        return Optimizer.MOMENTUM
    return Optimizer.ADAMW if name is OptimizerName.ADAM else Optimizer(str(name))


def usual_rows(subject: Subject) -> list[tuple[Precision, int, int]]:
    """The guide's four rows: FP32, FP16, BF16, and BF16 with a smaller micro-batch accumulated to the same update."""
    micro, accumulate = subject.micro, subject.accumulate
    parts = next((parts for parts in (4, 2, 3, 5) if micro % parts == 0), 1)
    plain = [(precision, micro, accumulate) for precision in (Precision.FP32, Precision.FP16, Precision.BF16)]
    return [*plain, (Precision.BF16, micro // parts, accumulate * parts)] if parts > 1 else plain
