"""What `benchmarks.sharding` starts, on two ranks or one: `torchrun -m benchmarks.on_ranks WHAT`; rank 0 prints JSON."""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.loops import CLIP_NORM, adamw, through_accelerate
from benchmarks.models import LARGER, Batch, Shape, cross_entropy, gpt
from halfstep import Engine
from halfstep.distributed import world
from halfstep.engine import assembly
from halfstep.measure.clock import interleaved_s
from halfstep.measure.memory import peak_resident_bytes, reset_peak, resident_bytes

WINDOW = 8
SMALL = Shape(layers=2, width=64, heads=2, vocabulary=64)
CPU = torch.device("cpu")


def engine_of(model: torch.nn.Module, sharding: str) -> Engine:
    """The engine that is measured, in BF16 with clipping and fused AdamW."""
    return Engine(
        model, adamw(model), loss=cross_entropy, precision="bf16", accumulate=WINDOW, clip_norm=CLIP_NORM, sharding=sharding
    )


class Endless:
    """The window's micro-batches again and again, as a loader of this rank's part."""

    def __init__(self, window: list[Batch]) -> None:
        self.window = window

    def __iter__(self) -> Any:
        while True:
            yield from self.window


def short(window: list[Batch]) -> list[Batch]:
    """The micro-batches with a few tokens of each text."""
    return [(x[:, :8].contiguous(), y[:, :8].contiguous()) for x, y in window]


def seconds(rounds: int) -> dict[str, list[float]]:
    """Seconds of an update in DDP, ours and Accelerate's in turn."""
    ours, window = gpt(CPU, micro_batch=1, window=WINDOW)
    theirs, _ = gpt(CPU, micro_batch=1, window=WINDOW)
    updates = engine_of(ours, "ddp").updates(Endless(window), epochs=None)
    works = {"halfstep": lambda: next(updates), "Accelerate": through_accelerate(theirs, window, cross_entropy)}
    return interleaved_s(works, CPU, rounds=rounds, warmup_rounds=min(rounds, 3))


def collectives() -> dict[str, Any]:
    """The collectives of windows of 8 and of 1 micro-batches in DDP, and the buckets of its gradients."""
    model, window = gpt(CPU, micro_batch=1, window=WINDOW, shape=LARGER)
    engine = engine_of(model, "ddp")
    updates = engine.updates(Endless(short(window)), epochs=None)
    for _ in range(3):  # after the first, DDP sorts its buckets anew
        next(updates)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        next(updates)
    counted = Counter(event.name for event in profiled.events() if event.name.startswith("gloo:"))
    assert isinstance(engine.model, DistributedDataParallel)
    sizes = engine.model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return {"collectives": dict(counted), "buckets": len(str(sizes).split(","))}


def ddp(rounds: int) -> dict[str, Any]:
    """Both; no seconds where there are no rounds."""
    return {"seconds": seconds(rounds) if rounds else None, **collectives()}


def peak(sharding: str, micro_batch: int) -> int:
    """The most bytes that this rank held above what it held before the model was made.

    It makes an update of few tokens, which leaves the optimizer's states, and one of two micro-batches.

    The operating system counts them: the C library must give large pieces of memory back at once (`MALLOC_MMAP_THRESHOLD_`). The
    engine is told that memory is short, so that it keeps no whole gradients.
    """
    assembly.free_bytes = lambda device: 0
    small, few = gpt(CPU, micro_batch=1, window=2, shape=SMALL)
    engine_of(small, sharding).update(few)  # what is loaded and made once is no memory of the model
    del small
    gc.collect()
    before = resident_bytes() or 0
    model, window = gpt(CPU, micro_batch=micro_batch, window=2, shape=LARGER)
    engine = engine_of(model, sharding)
    gc.collect()
    reset_peak(CPU)
    for micro_batches in (short(window), window):  # the first makes the optimizer's states
        engine.update(micro_batches)
    return (peak_resident_bytes() or 0) - before


def activations(micro_batch: int) -> int:
    """Bytes that forward and backward in BF16 need at most beside the weights, until the first gradients of weights."""
    small, few = gpt(CPU, micro_batch=1, window=1, shape=SMALL)
    cross_entropy(small.to(torch.bfloat16), few[0]).backward()
    model, window = gpt(CPU, micro_batch=micro_batch, window=1, shape=LARGER)
    model.to(torch.bfloat16)
    gc.collect()
    before = resident_bytes() or 0
    reset_peak(CPU)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model, window[0])
    assert loss.requires_grad
    return (peak_resident_bytes() or 0) - before


WHAT = {
    "ddp": lambda: ddp(int(sys.argv[2])),
    "peak": lambda: peak(sys.argv[2], int(sys.argv[3])),
    "activations": lambda: activations(int(sys.argv[2])),
}

if __name__ == "__main__":
    if world().size > 1:
        dist.init_process_group("gloo")
    found = WHAT[sys.argv[1]]()
    if world().is_first:
        print(json.dumps(found))
