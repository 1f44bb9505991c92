"""Two ranks on one machine, by DDP and in shards: `python -m benchmarks.sharding`.

Every row is measured here; `benchmarks.on_ranks` is what runs on the ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.harness import Goal, Row, main, ratio_row, skipped
from benchmarks.models import LARGER, gpt
from halfstep._compat import accelerator_device
from halfstep.measure.stats import summarize

RANKS = 2
MICRO_BATCH = 4
RETURNED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Tells the C library to give large pieces of memory back, so that the operating system's count is that of tensors."""


def on_ranks(*words: str, ranks: int = RANKS, **variables: str) -> Any:
    """What rank 0 found."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([*command, "-m", "benchmarks.on_ranks", *words], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def ddp(quick: bool) -> Iterable[Row]:
    """An update of 12.9 M parameters by 8 micro-batches of 128 tokens on each rank, over gloo, and the collectives of 42 M."""
    what, goal = "DDP update, 2 ranks, window 8", Goal(bound=0.95)
    has_accelerate = find_spec("accelerate") is not None
    found = on_ranks("ddp", str((1 if quick else 11) if has_accelerate else 0))
    if has_accelerate:
        yield ratio_row(what, "Accelerate", found["seconds"]["halfstep"], found["seconds"]["Accelerate"], goal=goal)
    else:
        yield skipped(what, "Accelerate", "accelerate is not installed", goal)
    counted = sum(found["collectives"].values())
    yield Row(
        what="collectives in a window of 8, 2 ranks",
        against="buckets of gradients + 1",
        figure=summarize([counted / (found["buckets"] + 1)], "x"),
        goal=Goal(bound=1.0),
        note=f"{counted} counted by the profiler ({found['collectives']}), {found['buckets']} buckets",
    )


def memory(quick: bool) -> Iterable[Row]:
    """The most that a rank takes, against 16 bytes a parameter shared out and the activations of a micro-batch."""
    parameters = sum(p.numel() for p in gpt(torch.device("cpu"), shape=LARGER)[0].parameters())
    with ThreadPoolExecutor() as both:  # bytes are counted, not seconds
        alone = both.submit(on_ranks, "activations", str(MICRO_BATCH), ranks=1, **RETURNED_AT_ONCE)
        peaks = [on_ranks("peak", "zero3", str(MICRO_BATCH), **RETURNED_AT_ONCE) for _ in range(1 if quick else 3)]
    ideal = 16 * parameters / RANKS + alone.result()
    yield Row(
        what="memory of a rank, zero3 on 2 ranks, AdamW, 42 M parameters",
        against="16 B x parameters / 2 + activations",
        figure=summarize([peak / ideal for peak in peaks], "x"),
        goal=Goal(bound=1.1),
        note=(
            f"{summarize([peak / 1e6 for peak in peaks], 'MB')} resident above what was there before the model, against "
            f"16 x {parameters / 1e6:.1f} / 2 + {alone.result() / 1e6:.0f} MB; {MICRO_BATCH} x 128 tokens in BF16; tied "
            "embeddings of a tenth of the parameters, gathered whole, are in it"
        ),
    )


BENCHMARKS = {"ddp": ddp, "memory": memory}

if __name__ == "__main__":
    sys.exit(main("Two ranks on one machine, by DDP and in shards.", BENCHMARKS, accelerator_device()))
