"""An update as on a device, looked at on the CPU: nothing is read from a tensor, and no host number becomes one by copying.

On a GPU either makes the host wait; `test_no_waiting` proves the same there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import Engine
from halfstep.precision.scaler import ScalerSettings
from parity.by_hand import Batch, as_if_on_a_device, cut, samples, tiny_model, weighted_loss

READS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select")
COPIES = ("aten::lift_fresh", "aten::lift_fresh_copy")
"""What `torch.tensor` and `torch.as_tensor` do with host numbers."""


class Watching(TorchDispatchMode):
    """Notes every operation that would make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = operation.name().split(".")[0]
        if name in READS + COPIES:
            self.found.append(name)
        return operation(*args, **(kwargs or {}))


def with_device_weight(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return weighted_loss(model, batch)


def with_host_weight(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return weighted_loss(model, batch)[0], len(batch.x)


def with_mean(model: nn.Module, batch: Batch) -> Tensor:
    return weighted_loss(model, batch)[0] / len(batch.x)


def window_of_batches() -> list[Batch]:
    return cut(samples(7, weights=[2, 0, 3, 1, 1, 5, 1]), [3, 2, 2])


LOW = ScalerSettings(init_scale=2.0**8)
"""No update overflows: a skip is diagnosed, which reads."""
LOSSES: list[Callable[..., Any]] = [with_device_weight, with_host_weight, with_mean]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("make", "clip_norm"), [(AdamW, 0.1), (SGD, None)], ids=["AdamW, clipped", "SGD"])
def test_an_update_after_the_first_reads_nothing(
    loss: Callable[..., Any], precision: str, make: Callable[..., Optimizer], clip_norm: float | None
) -> None:
    model, batches = tiny_model(), window_of_batches()
    optimizer = make(model.parameters(), lr=0.01, fused=True)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.9)
    given: dict[str, Any] = {"loss": loss, "scheduler": scheduler, "precision": precision, "clip_norm": clip_norm, "scaler": LOW}
    engine = as_if_on_a_device(Engine(model, optimizer, **given))
    engine.update(batches)
    with Watching() as watching:
        engine.update(batches)
        engine.update(batches)
        list(engine.updates(batches))
    assert watching.found == []
    assert scheduler.last_epoch == 6, "applied updates: scheduler and counters moved without a read"


def test_a_window_of_the_callers_own_reads_nothing() -> None:
    model = tiny_model()
    engine, batches = (
        as_if_on_a_device(Engine(model, AdamW(model.parameters(), fused=True), precision="bf16")),
        window_of_batches(),
    )
    for number in range(3):
        with Watching() as watching, engine.window() as window:
            for batch in batches:
                with window.forward():
                    total, weight = weighted_loss(engine.model, batch)
                window.backward(total, weight)
        assert bool(watching.found) == (number == 0), "the first window fixes the reference of the weights, and it alone"


def test_the_watch_sees_reads_and_copies() -> None:
    with Watching() as watching:
        float(torch.ones(()))
        bool(torch.ones(()) > 0)
        torch.tensor(1.0)
        torch.as_tensor(2.0)
    assert watching.found.count("aten::_local_scalar_dense") == 2
    assert watching.found.count("aten::lift_fresh") == 2
