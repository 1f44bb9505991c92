"""GPU memory: halving when it runs out, and what activation checkpointing saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from gpu.models import WIDTH, adamw, flat, mean, on_device, ragged, small_model
from halfstep import Engine

pytestmark = pytest.mark.gpu

MIB = 2**20


@contextmanager
def at_most(allowed_bytes: int, device: torch.device) -> Iterator[None]:
    """Let this process have so much of the GPU's memory beyond what it holds."""
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((held + allowed_bytes) / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()


def wide_loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    """Of each sample, a number, it makes a row of 16 KiB."""
    rows = batch[:, None] * torch.linspace(0, 1, 4096, device=batch.device)
    return model(rows).square().sum(), len(batch)


def trained_rows(device: torch.device, batches: list[Tensor]) -> tuple[Engine, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4096, 64), nn.Linear(64, 4096)).to(device)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1e-3, fused=True), loss=wide_loss, precision="fp32")
    for batch in batches:
        assert engine.update([batch]).applied
    return engine, flat(model)


def test_micro_batches_are_halved_when_cuda_runs_out_and_the_update_is_the_same(device: torch.device) -> None:
    """16,384 samples want 256 MiB for their rows alone, and several times that for what is made of them."""
    batches = [torch.linspace(-1, 1, 16_384, device=device), torch.linspace(0, 1, 16_384, device=device)]
    start = trained_rows(device, [])[1]
    _, wanted = trained_rows(device, batches)
    with at_most(400 * MIB, device):
        engine, halved = trained_rows(device, batches)
    parts = engine.choices["micro_batch_parts"]
    assert parts.value > 1
    assert parts.reason.startswith("memory ran out with larger micro-batches")
    assert float((halved - wanted).norm() / (wanted - start).norm()) < 2e-2


def peak_bytes(device: torch.device, *, checkpoint: bool) -> int:
    model = small_model(device, blocks=12)
    engine = Engine(model, adamw(model), loss=mean, precision="fp32", checkpoint_activations=checkpoint)
    (batch,) = ragged(device, 1)
    large = type(batch)(x=batch.x.repeat(512, 1), labels=batch.labels.repeat(512))
    engine.update([large])
    engine.settle()
    torch.cuda.reset_peak_memory_stats(device)
    engine.update([large])
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def test_activation_checkpointing_lowers_the_peak(device: torch.device) -> None:
    assert peak_bytes(device, checkpoint=True) < 0.6 * peak_bytes(device, checkpoint=False)


def test_an_update_keeps_no_more_than_the_loop_by_hand(device: torch.device) -> None:
    """Both with four micro-batches: parameters, gradients, moments, and the activations of one."""
    model = small_model(device, blocks=4)
    engine = Engine(model, adamw(model), loss=on_device, precision="fp32")
    theirs = small_model(device, blocks=4)
    optimizer = adamw(theirs)
    batches = ragged(device, 4)

    def by_hand() -> None:
        optimizer.zero_grad()
        for batch in batches:
            total, _ = on_device(theirs, batch)
            (total / 64).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()

    def peak(update: object) -> int:
        assert callable(update)
        update()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        update()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    ours, hand = peak(lambda: engine.update(batches)), peak(by_hand)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert ours <= 1.02 * (hand + gradients), "the loop by hand holds its gradients from the update before; ours has dropped them"


def test_a_loss_with_an_error_of_cudas_is_not_taken_for_want_of_memory(device: torch.device) -> None:
    model = small_model(device)

    def wrong(called: nn.Module, batch: Tensor) -> Tensor:
        return called(batch[:, : WIDTH - 1]).sum()

    with pytest.raises(RuntimeError, match="normalized_shape"):
        Engine(model, adamw(model), loss=wrong, precision="fp32").update([torch.ones(2, WIDTH, device=device)])
