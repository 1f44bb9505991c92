"""What is certified: a model, its loss and a few micro-batches, which can be made again in another process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from halfstep.config.load import load
from halfstep.engine.batch import num_samples, tensors, to_device
from halfstep.engine.loss import LossFunction, sum_and_weight
from halfstep.errors import ConfigError, HalfstepError, ModelError
from halfstep.precision.untouched import untouched
from halfstep.train.build import few_batches
from halfstep.train.job import prepare
from halfstep.train.own import called, told
from halfstep.train.tasks import loss_of

MICRO_BATCHES = 4
SAMPLES = 2
OVERRIDES = ("precision=fp32", "limits.updates=8", "evaluation.every_updates=0")
"""What certifying asks of a configuration: the precision is the certificate's to choose, and nothing is trained for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A model with what it is trained on.

    Attributes:
        model: in FP32, on its device.
        loss: as `Engine` takes it.
        batches: the micro-batches of one global batch, two at least.
    """

    model: nn.Module
    loss: LossFunction
    batches: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """How the parts are made; the same in every process.

    Attributes:
        factory: "package.module:name" of a function that returns model, loss and micro-batches; None for a configuration.
        config: file of a `train` configuration; None for the default.
        settings: keys that are set over it.
    """

    factory: str | None = None
    config: str | None = None
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        over = f" with {', '.join(self.settings)}" if self.settings else ""
        return self.factory or f"{self.config or 'the default run of halfstep train'}{over}"

    def make(self) -> Parts:
        """The parts, made under fixed seeds.

        Raises:
            UsageError: they cannot be made, or are not what a certificate needs.
        """
        seed_all(0)
        parts = _of_config(self) if self.factory is None else _of_factory(self.factory)
        seed_all(0)
        return parts


def _try(parts: Parts) -> None:
    device = next(parts.model.parameters()).device
    try:
        with untouched(parts.model, device):
            result = parts.loss(parts.model, to_device(parts.batches[0], device))
    except HalfstepError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ModelError(f"The model or its loss fails on the first micro-batch: {told(error)}") from error
    sum_and_weight(result)


def seed_all(seed: int) -> None:
    """Set the generators of Python, NumPy and torch."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def _of_config(subject: Subject) -> Parts:
    path = None if subject.config is None else Path(subject.config)
    job = prepare(load(path, [*subject.settings, *OVERRIDES]), started=datetime.now())
    batches = few_batches(job.opened.train, job.run, job.device, count=MICRO_BATCHES, size=SAMPLES)
    return Parts(model=job.model, loss=loss_of(job.run), batches=batches)


def _of_factory(reference: str) -> Parts:
    made = called("factory", reference, {})
    right = "a tuple of the model, `loss(model, batch)` and a list of at least two micro-batches"
    if not isinstance(made, tuple) or len(made) != 3:
        raise ConfigError(f"The factory {reference} made {type(made).__name__}; it must return {right}.")
    model, loss, batches = made
    if not isinstance(model, nn.Module) or not callable(loss) or not isinstance(batches, Sequence) or len(batches) < 2:
        kinds = ", ".join(type(each).__name__ for each in made)
        raise ConfigError(f"The factory {reference} made ({kinds}); it must return {right}.")
    if not any(True for batch in batches for _ in tensors(batch)):
        raise ConfigError(f"The factory {reference} made micro-batches without a tensor; it must return {right}.")
    if sum(map(num_samples, batches)) < 2 * len(batches):
        raise ConfigError(f"The factory {reference} made micro-batches of one sample; give them two or more, so that they split.")
    _check_model(reference, model)
    parts = Parts(model=model, loss=loss, batches=batches)
    _try(parts)
    return parts


def _check_model(reference: str, model: nn.Module) -> None:
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    if not dtypes:
        raise ModelError(f"The factory {reference} made a model without a parameter to train.")
    if dtypes != {torch.float32}:
        kinds = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ModelError(
            f"The factory {reference} made a model in {kinds}; a certificate is about one in float32: call `.float()`."
        )
