"""The highest memory of an update, in a process of its own: `python -m benchmarks.peak KIND WAY [MICRO_BATCH]` prints bytes.

Two ways to look: "tensors" counts what torch's allocator handed out, exactly; "resident" is what the operating system saw of
the process above what it held before the model was made. The second holds freed memory that the C library keeps, and
differs by a few percent from run to run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.loops import by_hand, engine_update
from benchmarks.models import Batch, cross_entropy, gpt
from halfstep._compat import accelerator_device
from halfstep.measure.clock import Work
from halfstep.measure.memory import memory_use, reset_peak

MICRO_BATCH = 16
NUM_UPDATES = 2
"""The first makes the optimizer's states, the second runs with them."""

KINDS: dict[str, Callable[[torch.nn.Module, list[Batch]], Work]] = {
    "by hand": lambda model, window: by_hand(model, window, cross_entropy),
    "halfstep": lambda model, window: engine_update(model, window, cross_entropy),
    "halfstep, checkpointed": lambda model, window: engine_update(model, window, cross_entropy, checkpoint_activations=True),
}


def train(kind: str, device: torch.device, micro_batch: int) -> None:
    """Make the model and update it."""
    model, window = gpt(device, micro_batch=micro_batch, window=2)
    update = KINDS[kind](model, window)
    for _ in range(NUM_UPDATES):
        update()


def tensor_bytes(kind: str, device: torch.device, micro_batch: int) -> int:
    """The most that all tensors together took."""
    if device.type != "cpu":
        return resident_bytes(kind, device, micro_batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        train(kind, device, micro_batch)
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = highest = 0
    for _, change in changes:
        held += change
        highest = max(highest, held)
    return highest


def resident_bytes(kind: str, device: torch.device, micro_batch: int) -> int:
    """The most that the process held above what it held before; on an accelerator, what its allocator handed out."""
    before = memory_use(device).allocated_bytes or 0
    reset_peak(device)
    train(kind, device, micro_batch)
    highest = memory_use(device).peak_allocated_bytes
    assert highest is not None, f"{device} does not tell its highest use"
    return highest - before


WAYS = {"tensors": tensor_bytes, "resident": resident_bytes}

if __name__ == "__main__":
    kind, way, *rest = sys.argv[1:]
    print(WAYS[way](kind, accelerator_device(), int(rest[0]) if rest else MICRO_BATCH))
