"""One update, written by hand and through each library as its documentation shows.

All compute the same: BF16 autocast, a window of micro-batches, clipping at norm 1 and fused AdamW.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from benchmarks.models import Batch
from halfstep import Engine
from halfstep.measure.clock import Work

Loss = Callable[[nn.Module, Batch], torch.Tensor]
Loop = Callable[[nn.Module, Sequence[Batch], Loss], Work]
CLIP_NORM = 1.0


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every loop."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def by_hand(model: nn.Module, window: Sequence[Batch], loss_function: Loss) -> Work:
    """The loop of torch's AMP examples."""
    optimizer, device = adamw(model), next(model.parameters()).device

    def update() -> None:
        for batch in window:
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_function(model, batch) / len(window)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return update


def through_engine(model: nn.Module, window: Sequence[Batch], loss_function: Loss) -> Work:
    """halfstep's loop."""
    return engine_update(model, window, loss_function)


def engine_update(
    model: nn.Module, window: Sequence[Batch], loss_function: Loss, *, checkpoint_activations: bool = False
) -> Work:
    """halfstep's loop, with activation checkpointing if asked."""
    engine = Engine(
        model,
        adamw(model),
        loss=loss_function,
        precision="bf16",
        accumulate=len(window),
        clip_norm=CLIP_NORM,
        checkpoint_activations=checkpoint_activations,
    )
    return lambda: engine.update(window)


def through_accelerate(model: nn.Module, window: Sequence[Batch], loss_function: Loss) -> Work:
    """Accelerate's guide to gradient accumulation, with its clipping."""
    from accelerate import Accelerator

    on_cpu = next(model.parameters()).device.type == "cpu"
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=len(window), cpu=on_cpu)
    model, optimizer = accelerator.prepare(model, adamw(model))

    def update() -> None:
        for batch in window:
            with accelerator.accumulate(model):
                accelerator.backward(loss_function(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                optimizer.zero_grad()

    return update


def through_fabric(model: nn.Module, window: Sequence[Batch], loss_function: Loss) -> Work:
    """Fabric's guide to gradient accumulation, with the loss divided and the gradients clipped."""
    from lightning.fabric import Fabric

    device = next(model.parameters()).device
    quiet()
    fabric = Fabric(accelerator=device.type, devices=1, precision="bf16-mixed")
    wrapped: Any
    wrapped, optimizer = fabric.setup(model, adamw(model))
    last = len(window) - 1

    def update() -> None:
        for index, batch in enumerate(window):
            with fabric.no_backward_sync(wrapped, enabled=index < last):
                fabric.backward(loss_function(wrapped, batch) / len(window))
        fabric.clip_gradients(wrapped, optimizer, max_norm=CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return update


LOOPS: dict[str, Loop] = {
    "by hand": by_hand,
    "halfstep": through_engine,
    "Accelerate": through_accelerate,
    "Fabric": through_fabric,
}
NEEDS = {"Accelerate": "accelerate", "Fabric": "lightning"}


def missing(name: str) -> str | None:
    """Why a loop cannot run here; None if it can."""
    package = NEEDS.get(name)
    if package is None or find_spec(package) is not None:
        return None
    return f"{package} is not installed (pip install -e '.[bench]' -c constraints.txt)"


def quiet() -> None:
    """Keep Lightning's announcements out of the table."""
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
