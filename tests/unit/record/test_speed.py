"""Problem 2: what could be saved follows from what was measured by arithmetic, and measuring changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader, TensorDataset

from halfstep.record.probes.savings import Lines, Profile, savings
from halfstep.record.probes.speed import Speed
from halfstep.report.parts import Bars, Table
from unit.record.watched import mlp, pairs, squares, watched

FP32, BF16 = torch.float32, torch.bfloat16
WELL = Profile(
    updates=3,
    seconds=1.0,
    waiting_s=0.01,
    forward_s=0.3,
    backward_s=0.6,
    optimizer_s=0.03,
    optimizer="AdamW",
    optimizer_form="fused",
    products_s=0.7,
    flops={BF16: 1e12},
    odd_flops=0.0,
    casts_s=0.01,
    casts=8,
    reads=(),
    transfers=(),
    transfers_s=None,
    small_s=0.1,
    small=50,
    operations=500,
    tf32_off=False,
    recompiles=0,
    speedup=4.0,
    device_type="cuda",
)
READ = Lines(place=None, count=2)


def test_an_update_that_is_well_has_nothing_to_save() -> None:
    assert savings(WELL) == []


def test_fp32_products_could_save_what_the_measured_factor_leaves() -> None:
    """Half of the work in FP32 takes four of five parts of the products' time, and would take one of these four."""
    (saving,) = savings(replace(WELL, flops={FP32: 5e11, BF16: 5e11}))
    assert saving.card.name == "fp32-matrix-products"
    assert saving.seconds == pytest.approx(0.7 * 0.8 * 0.75)
    assert saving.told == "50% of 1e+03 GFLOP an update are FP32; low precision is faster by 4.0 here"


def test_a_device_that_is_no_faster_in_low_precision_is_left_in_fp32() -> None:
    assert savings(replace(WELL, flops={FP32: 1e12}, speedup=0.4)) == []


def test_a_factor_that_was_not_measured_is_unknown() -> None:
    (saving,) = savings(replace(WELL, flops={FP32: 1e12}, speedup=None))
    assert (saving.seconds, saving.told) == (
        None,
        "100% of 1e+03 GFLOP an update are FP32; low precision is faster by unknown here",
    )


@pytest.mark.parametrize(
    ("changed", "name", "seconds"),
    [
        ({"waiting_s": 0.2}, "input-wait", 0.2),
        ({"casts_s": 0.1}, "time-in-casts", 0.1),
        ({"optimizer_s": 0.2, "optimizer_form": "loop"}, "optimizer-loop", 0.2),
        ({"odd_flops": 2e11}, "odd-shapes", None),
        ({"reads": (READ,)}, "host-reads", None),
        ({"transfers": (replace(READ, what="cpu to cuda, not pinned, blocking"),), "transfers_s": 0.1}, "slow-transfers", 0.1),
        ({"small_s": 0.4}, "small-kernels", 0.4),
        ({"recompiles": 2}, "recompiles", None),
    ],
)
def test_each_fault_is_told_with_the_most_that_it_costs(changed: dict[str, object], name: str, seconds: float | None) -> None:
    (saving,) = savings(replace(WELL, **changed))  # type: ignore[arg-type]
    assert (saving.card.name, saving.seconds) == (name, seconds)


def test_tf32_that_is_off_is_told() -> None:
    names = [s.card.name for s in savings(replace(WELL, flops={FP32: 1e12}, tf32_off=True))]
    assert names == ["fp32-matrix-products", "tf32-off"]


def test_savings_come_largest_first_and_unknown_ones_last() -> None:
    found = savings(replace(WELL, waiting_s=0.1, casts_s=0.2, recompiles=1))
    assert [saving.seconds for saving in found] == [0.2, 0.1, None]


def loader() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 4)), batch_size=8)


def reading(output: Tensor, target: Tensor) -> Tensor:
    loss = squares(output, target)
    loss.item()
    return loss


def test_flops_of_an_update_are_those_of_its_matrices() -> None:
    """Forward 2 products; backward 2 for the weights and 1 for the hidden input."""
    probe = watched(Speed(rate_budget_s=0.001), mlp(), loader(), dtype=BF16, loss=reading)
    assert probe.failure == ""
    measured = probe._profile
    assert measured is not None
    assert measured.flops == {BF16: 5 * 2 * 8 * 4 * 4}
    assert measured.odd_flops == measured.flops[BF16]
    assert measured.casts > 0
    assert measured.seconds > measured.forward_s > 0
    assert sum(read.count for read in measured.reads if read.place and read.place.path == __file__) == 1
    phases, work, *saved, table = probe.measurements()
    assert isinstance(phases, Bars)
    assert isinstance(work, Bars)
    assert isinstance(table, Table)
    assert [part.title for part in (*saved, table)][-1] == "What to change"
    assert all(isinstance(part, Bars) and len(part.items) == len(table.rows) for part in saved)
    assert [name for name, _ in phases.items] == ["waiting for data", "forward", "backward", "optimizer step", "the rest"]
    assert work.items == (("bfloat16", 1.28e-06),)


@pytest.mark.parametrize("updates", [1, 3, 5, 8])
def test_weights_are_bitwise_the_same_and_nothing_is_left_however_early_the_script_ends(updates: int) -> None:
    def end(probe: Speed | None) -> Iterator[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if probe is not None:
            watched(probe, model, pairs(updates), optimizer=optimizer)
        else:
            for x, y in pairs(updates):
                squares(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return (p.detach() for p in model.parameters())

    assert all(map(torch.equal, end(None), end(Speed(rate_budget_s=0.001))))
    assert _get_current_dispatch_mode() is None
    assert _get_current_function_mode() is None


def test_a_script_that_ends_too_early_is_told_so() -> None:
    (part,) = watched(Speed(), mlp(), pairs(2)).measurements()
    assert part.about == "The script ended within 5 updates, or skipped them: nothing was profiled."
