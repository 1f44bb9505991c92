"""DDP over NCCL: two GPUs make the updates that one makes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch

from distributed.ranks import Ranks
from gpu.models import flat, on_device, ragged, small_model
from halfstep import Engine
from halfstep.precision.scaler import ScalerSettings

pytestmark = pytest.mark.gpu

Deal = Sequence[Sequence[int]]
EVEN: Deal = [[0, 1], [2, 3]]
UNEVEN: Deal = [[0, 1, 2], [3]]
ALONE: Deal = [[], [0, 1]]
WINDOWS = [EVEN, UNEVEN, EVEN, ALONE, UNEVEN, EVEN]


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"NCCL wants a GPU for each of two ranks, and there is {torch.cuda.device_count()}")


def train(precision: str, late: bool, rank: int | None) -> tuple[torch.Tensor, list[float], int]:
    """Weights, losses and the number of applied updates; of one process where `rank` is None."""
    rank = int(os.environ["RANK"]) if rank is None and "RANK" in os.environ else rank
    device = torch.device("cuda", rank or 0)
    torch.cuda.set_device(device)
    model = small_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    scaler = ScalerSettings(init_scale=2.0**10)
    engine = Engine(
        model, optimizer, loss=on_device, precision=precision, clip_norm=0.5, scaler=scaler, find_unused_parameters=late
    )
    batches = ragged(device, 4)
    losses = []
    for deal in WINDOWS:
        mine = [number for part in deal for number in part] if rank is None else deal[rank]
        losses.append(engine.update([batches[number] for number in mine]).loss)
    engine.settle()
    return flat(model).cpu(), losses, engine.ledger.applied


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("late", [False, True], ids=["in DDP", "late"])
def test_two_gpus_do_what_one_does(precision: str, late: bool) -> None:
    pair = Ranks(joined=False)
    try:
        (first, losses, applied), (second, same, _) = pair(train, precision, late, None)
    finally:
        pair.close()
    alone, wanted, _ = train(precision, late, None)
    start = flat(small_model(torch.device("cpu")))
    assert torch.equal(first, second)
    assert losses == same == pytest.approx(wanted, rel=2e-2)
    assert applied == len(WINDOWS)
    assert float((first - alone).norm() / (alone - start).norm()) < 5e-2
