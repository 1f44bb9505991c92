"""After the first update the host waits for the GPU nowhere: torch raises where it would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from gpu.models import adamw, mean, on_device, on_host, ragged, small_model
from halfstep import Engine
from halfstep.precision.scaler import ScalerSettings

pytestmark = pytest.mark.gpu

LOSSES: list[Callable[..., Any]] = [on_device, on_host, mean]


@contextmanager
def nobody_waits() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_watch_sees_a_wait(device: torch.device) -> None:
    value = torch.ones((), device=device)
    with nobody_waits(), pytest.raises(RuntimeError, match="synchroniz"):
        value.item()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_an_update_waits_nowhere(device: torch.device, loss: Callable[..., Any], precision: str, clip_norm: float | None) -> None:
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip(f"{torch.cuda.get_device_name()} has no BF16 arithmetic")
    model = small_model(device)
    optimizer = adamw(model)
    engine = Engine(
        model,
        optimizer,
        loss=loss,
        scheduler=LambdaLR(optimizer, lambda steps: 1 / (1 + steps)),
        precision=precision,
        clip_norm=clip_norm,
        scaler=ScalerSettings(init_scale=2.0**8),
    )
    batches = ragged(device, 12)
    engine.update(batches[:4])
    with nobody_waits():
        engine.update(batches[4:8])
        engine.update(batches[8:])
    engine.settle()
    assert engine.ledger.applied == 3


def test_a_loader_of_pinned_batches_waits_nowhere(device: torch.device) -> None:
    model = small_model(device)
    engine = Engine(model, adamw(model), loss=on_device, precision="fp32", accumulate=2)
    pinned = [type(batch)(x=batch.x.pin_memory(), labels=batch.labels.pin_memory()) for batch in ragged(torch.device("cpu"), 8)]
    engine.update(pinned[:2])
    with nobody_waits():
        for _ in engine.updates(pinned):
            pass
    assert engine.ledger.applied == 5


def test_a_window_of_the_callers_own_waits_nowhere(device: torch.device) -> None:
    model = small_model(device)
    engine = Engine(model, adamw(model), precision="fp16", scaler=ScalerSettings(init_scale=2.0**8))
    batches = ragged(device, 4)

    def one_window() -> None:
        with engine.window() as window:
            for batch in batches:
                with window.forward():
                    total, weight = on_device(engine.model, batch)
                window.backward(total, weight)

    one_window()
    with nobody_waits():
        one_window()
        one_window()
    engine.settle()
    assert engine.ledger.applied == 3


def test_reading_what_an_update_tells_waits_and_is_right(device: torch.device) -> None:
    model = small_model(device)
    engine = Engine(model, adamw(model), loss=on_device, precision="fp32")
    batches = ragged(device, 2)
    update = engine.update(batches)
    assert update.weight == sum(int((batch.labels != -100).sum()) for batch in batches)
    assert update.applied
    assert engine.counters.weight == update.weight
