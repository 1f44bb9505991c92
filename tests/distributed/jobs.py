"""What the ranks of these tests do: the same training, with the samples of each window dealt out over one rank or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from halfstep import Engine, Update
from halfstep.precision.scaler import ScalerSettings
from parity.by_hand import Batch, as_if_on_a_device, assert_bitwise, assert_near, samples, state, tiny_model, weighted_loss

Indices = Sequence[int]
Deal = Sequence[Sequence[Indices]]
"""A window: of each rank, its micro-batches, each by the numbers of its samples."""

LOW_SCALE = ScalerSettings(init_scale=2.0**10, growth_interval=3)
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(AdamW, lr=0.01, fused=True),
}
ROUNDING = {"SGD": 2e-6, "AdamW": 1e-4}
"""AdamW divides by what it has seen: a gradient near zero that differs in its last bit moves a parameter by a visible amount."""
HALF_ROUNDING = 1e-2
"""A sum in BF16 is off by 2^-8 where it is added up in another order, and a weight that differs in its last bit may be cast to
the next number."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training.

    Attributes:
        windows: the samples of each update.
        weights: what each sample counts; its length is the number of samples.
        optimizer: one of `OPTIMIZERS`.
        factors: what the loss of a sample's micro-batch is multiplied by, by the sample's number.
        given: what the engine is given besides.
        on_host: whether updates end as on a CPU; else as on a device.
        model: makes the model.
    """

    windows: Sequence[Deal]
    weights: Sequence[float]
    optimizer: str = "SGD"
    factors: dict[int, float] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    on_host: bool = True
    model: Callable[[], nn.Module] = tiny_model


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training left, and what its updates told."""

    state: dict[str, Any]
    told: list[dict[str, Any]]
    rates: list[float]
    kept: dict[str, Any]
    choices: dict[str, str]


def train(job: Job) -> Trained:
    """Train on this rank's part of every window, or on all of it where there is one process."""
    return trained(job, lambda engine: [engine.update([batch_of(job, each) for each in mine(deal)]) for deal in job.windows])


def trained(job: Job, run: Callable[[Engine], Iterable[Update]]) -> Trained:
    """What a training leaves whose updates `run` makes with an engine as the job says."""
    model = job.model()
    optimizer = OPTIMIZERS[job.optimizer](model.parameters())
    scheduler = StepLR(optimizer, step_size=1, gamma=0.9)
    given = {"loss": weighted_loss, "precision": "fp32", "scaler": LOW_SCALE, **job.given}
    engine = Engine(model, optimizer, scheduler=scheduler, **given)
    updates = list(run(engine if job.on_host else as_if_on_a_device(engine)))
    engine.settle()
    return Trained(
        state=state(model, optimizer),
        told=[told(update) for update in updates],
        rates=scheduler.get_last_lr(),
        kept=engine.state_dict(),
        choices={name: str(choice) for name, choice in engine.choices.items()},
    )


def mine(deal: Deal) -> list[Indices]:
    """This rank's micro-batches of a window; in one process those of all ranks."""
    return list(deal[dist.get_rank()]) if dist.is_initialized() else [indices for rank in deal for indices in rank]


def batch_of(job: Job, indices: Indices) -> Batch:
    """The micro-batch of these samples."""
    dtype = torch.bfloat16 if job.given.get("precision") == "bf16-pure" else torch.float32
    whole, chosen = samples(len(job.weights), weights=job.weights, dtype=dtype), torch.tensor(indices, dtype=torch.long)
    factor = 1.0
    for index in indices:
        factor *= job.factors.get(index, 1.0)
    return Batch(x=whole.x[chosen], y=whole.y[chosen], weight=whole.weight[chosen], factor=factor)


def told(update: Update) -> dict[str, Any]:
    """What an update says that is the same on all ranks."""
    return {
        "loss": update.loss,
        "grad_norm": update.grad_norm,
        "weight": update.weight,
        "scale": update.scale,
        "lr": update.lr,
        "applied": update.applied,
    }


def assert_ranks_agree(ranks: Sequence[Trained]) -> None:
    """The same bits on all ranks, and the same verdicts."""
    first = ranks[0]
    for other in ranks[1:]:
        assert_bitwise(first.state, other.state)
        assert_same_numbers(first.told, other.told, rel=0.0)
        assert first.rates == other.rates
        assert first.kept["scaler"] == other.kept["scaler"]


def assert_same_numbers(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], *, rel: float) -> None:
    """Two runs were told the same, numbers to so much rounding."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=rel, abs=1e-7 if rel else 0.0, nan_ok=True)


def assert_equals_one_process(job: Job, ranks: Sequence[Trained]) -> Trained:
    """The ranks agree, and did what one process does with the samples of all."""
    assert_ranks_agree(ranks)
    one = train(job)
    is_half = job.given.get("precision", "fp32") != "fp32"
    rounding = HALF_ROUNDING if is_half else ROUNDING[job.optimizer]
    assert_near(ranks[0].state, one.state, rtol=rounding, atol=rounding)
    assert_same_numbers(ranks[0].told, one.told, rel=2e-2 if is_half else 1e-4)
    assert ranks[0].rates == one.rates
    assert ranks[0].kept["scaler"] == one.kept["scaler"]
    return one
