"""A rank that does not come to meet the others: the run ends with its number and with what it was doing."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.ranks import Ended
from halfstep import Engine
from halfstep.distributed.failure import KEY

LONG_S = 30.0


def hangs(where: str) -> None:
    from torch.distributed.distributed_c10d import _get_default_store

    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    model = nn.Linear(2, 1)

    def loss(called: nn.Module, batch: Tensor) -> Tensor:
        if engine.group.rank == 1 and engine.ledger.applied == 2:
            wait_until_somebody_has_failed()
        return called(batch).square().mean()

    def wait_until_somebody_has_failed() -> None:
        ends = time.monotonic() + LONG_S
        while not _get_default_store().check([KEY]) and time.monotonic() < ends:
            pass

    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, precision="fp32")
    for _ in engine.updates([torch.ones(2, 2)] * 4):
        pass


def test_a_rank_that_hangs_is_named_with_what_it_does(started: Callable[..., list[Ended]]) -> None:
    first, second = started(hangs, "loss")
    assert first.error == "RunStopped"
    told = r"Rank 1 did not come to meet the others in time: rank 1 is in .*/test_hanging_rank\.py, line \d+, in \w+\."
    assert re.fullmatch(told, first.message), first.message
    assert second.error == "RunStopped"
    assert re.fullmatch(rf"Rank 0 failed, and with it the run: {told}", second.message), second.message
