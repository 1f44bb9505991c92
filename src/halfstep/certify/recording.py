"""The gradient that an update of the engine applies, heard by an optimizer that moves nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from halfstep.certify.exact import Result
from halfstep.certify.subject import Parts, seed_all
from halfstep.engine import Engine, Update

CALIBRATION = 32
"""Updates within which a loss scale must have come down from 2^16 to one under which the gradients are finite."""


class Recording(Optimizer):
    """Keeps the gradients of each step, and leaves the parameters as they are.

    Args:
        model: whose trainable parameters are heard.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        super().__init__([p for p in model.parameters() if p.requires_grad], {"lr": 1.0})
        self.heard: list[dict[str, torch.Tensor]] = []

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Keep the gradients."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.heard.append({n: _whole(p.grad) for n, p in zip(self.names, parameters, strict=True) if p.grad is not None})


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return whole.detach().clone().cpu()


def recorded(parts: Parts, *, tf32: bool = False, **settings: Any) -> tuple[Engine, Recording]:
    """An engine on a copy of the model whose optimizer only records; in FP32, and without TF32, unless asked otherwise."""
    model = copy.deepcopy(parts.model)
    optimizer = Recording(model)
    seed_all(0)
    engine = Engine(model, optimizer, **{"loss": parts.loss, "precision": "fp32", **settings})
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    return engine, optimizer


def update_of(parts: Parts, batches: Sequence[Any], **settings: Any) -> tuple[Result, Update]:
    """Loss and gradient of one update of the engine; of the first applied one, where FP16's loss scale has to come down first."""
    engine, optimizer = recorded(parts, accumulate=max(1, len(batches)), **settings)
    for _ in range(CALIBRATION):
        update = engine.update(batches)
        if update.applied or update.scale == 1:
            break
    gradients = optimizer.heard[-1] if optimizer.heard else {}
    return Result(loss=update.loss, gradients=gradients), update
