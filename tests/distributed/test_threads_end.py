"""Threads of an engine, and of the groups that it made, end with them: a process that makes many engines does not fill up."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from distributed.conftest import Both
from halfstep import Engine

KINDS = ("gloo", "halfstep")
TASKS = Path("/proc/self/task")


def threads() -> Counter[str]:
    """Threads of this process by name, those of gloo and ours."""
    dist.barrier()
    gc.collect()
    names = [path.read_text().strip() for path in TASKS.glob("*/comm")]
    return Counter(name for name in names if any(kind in name for kind in KINDS))


def make_engines(number: int) -> Counter[str]:
    models = [nn.Linear(2, 2) for _ in range(number)]
    engines = [Engine(model, SGD(model.parameters(), lr=0.1), precision="fp32") for model in models]
    assert len(engines) == number
    return threads()


@pytest.mark.skipif(not TASKS.exists(), reason="the system does not list a process's threads")
def test_the_threads_of_engines_end_with_their_group(both: Both) -> None:
    before = both(threads)
    for during, bare in zip(both(make_engines, 3), before, strict=True):
        assert sum(during.values()) > sum(bare.values()), "engines have threads, or nothing is shown here"
    assert both(threads) == before
