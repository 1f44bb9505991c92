"""Two ranks make the updates that one process makes of the same samples, however they are dealt out."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distributed.conftest import Both
from distributed.jobs import Deal, Job, assert_equals_one_process, train
from parity.by_hand import assert_bitwise

RAGGED = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0, 5.0, 8.0]
EVEN: Deal = [[[0, 1], [2]], [[3, 4, 5], [6]]]
UNEVEN: Deal = [[[0], [1, 2, 3], [4, 5]], [[6, 7]]]
ALONE: Deal = [[], [[8, 9], [10, 11]]]

ASSIGNMENTS = {
    "ragged micro-batches, as many on each rank": [EVEN] * 5,
    "another number of micro-batches on each rank": [UNEVEN] * 5,
    "one micro-batch on each rank": [[[[0, 1]], [[2, 3, 4]]], [[[5]], [[6, 7]]]] * 3,
    "a rank without data in the first window": [ALONE, EVEN, UNEVEN, EVEN, EVEN],
    "a rank without data in the second window": [EVEN, ALONE, EVEN, UNEVEN],
    "a rank without data after the first reduction during backward": [EVEN, EVEN, EVEN, ALONE, EVEN, ALONE, EVEN],
    "first rank without data after the first reduction": [EVEN, EVEN, EVEN, [[[0, 1]], []], EVEN],
    "a rank that never has data": [[[], [[0], [1, 2]]], [[], [[3, 4]]], [[], [[5]]], [[], [[6], [7]]]],
    "first rank never has data": [[[[0], [1, 2]], []], [[[3, 4]], []], [[[5]], []], [[[6], [7]], []]],
    "ranks take turns": [ALONE, [[[0, 1]], []], ALONE, [[[2]], []], EVEN, ALONE],
}


@pytest.mark.parametrize("windows", ASSIGNMENTS.values(), ids=ASSIGNMENTS)
@pytest.mark.parametrize("given", [{}, {"clip_norm": 0.05}, {"find_unused_parameters": True}], ids=str)
def test_ranks_do_what_one_process_does(both: Both, windows: list[Deal], given: dict[str, Any]) -> None:
    job = Job(windows=windows, weights=RAGGED, given=given)
    one = assert_equals_one_process(job, both(train, job))
    assert all(told["applied"] for told in one.told)


@pytest.mark.parametrize(("precision", "optimizer"), [("bf16", "SGD"), ("fp16", "SGD"), ("fp32", "AdamW")])
@pytest.mark.parametrize("on_host", [True, False], ids=["as on a CPU", "as on a device"])
def test_every_precision_and_both_ends_of_an_update(both: Both, precision: str, optimizer: str, on_host: bool) -> None:
    windows = [EVEN, UNEVEN, EVEN, ALONE, EVEN]
    given = {"precision": precision, "clip_norm": 0.5}
    job = Job(windows=windows, weights=RAGGED, optimizer=optimizer, given=given, on_host=on_host)
    assert_equals_one_process(job, both(train, job))


def test_gradients_clipped_by_value_are_the_same_on_ranks(both: Both) -> None:
    job = Job(windows=[EVEN, UNEVEN, ALONE, EVEN], weights=RAGGED, given={"clip_value": 0.01})
    assert_equals_one_process(job, both(train, job))


def test_pure_bf16_is_equal_on_both_ranks(both: Both) -> None:
    """Sums of BF16 gradients round to BF16, so that one process differs by that."""
    job = Job(windows=[EVEN, UNEVEN, ALONE, EVEN], weights=RAGGED, given={"precision": "bf16-pure"})
    first, second = both(train, job)
    assert first.told == second.told
    assert_bitwise(first.state, second.state)


@pytest.mark.parametrize("masked", [[0, 1, 2], [3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]], ids=["rank 0", "rank 1", "both ranks"])
@pytest.mark.parametrize("on_host", [True, False], ids=["as on a CPU", "as on a device"])
@pytest.mark.parametrize("first", [0, 3], ids=["in the first window", "later"])
def test_windows_in_which_nothing_counts_on_some_rank(both: Both, masked: list[int], on_host: bool, first: int) -> None:
    weights = [0.0 if index in masked else weight for index, weight in enumerate(RAGGED)]
    unmasked: Deal = [[[7], [8]], [[9, 10], [11]]]
    windows = [EVEN if number == first else unmasked for number in range(5)]
    job = Job(windows=windows, weights=weights, given={"precision": "fp16"}, on_host=on_host)
    one = assert_equals_one_process(job, both(train, job))
    nothing_counts = len(masked) == 7
    assert [told["applied"] for told in one.told] == [not (nothing_counts and number == first) for number in range(5)]


@pytest.mark.parametrize("factor", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("on_host", [True, False], ids=["as on a CPU", "as on a device"])
def test_what_is_not_finite_on_one_rank_makes_all_skip(both: Both, factor: float, precision: str, on_host: bool) -> None:
    """In the first window, in one that is reduced during backward, and in one where the other rank has no data."""
    bad_alone: Deal = [[], [[8, 9], [6]]]
    windows = [UNEVEN, ALONE, EVEN, UNEVEN, ALONE, bad_alone, ALONE]
    job = Job(windows=windows, weights=RAGGED, factors={6: factor}, given={"precision": precision}, on_host=on_host)
    ranks = both(train, job)
    one = assert_equals_one_process(job, ranks)
    assert [told["applied"] for told in one.told] == [False, True, False, False, True, False, True]
    assert ranks[0].kept["ledger"]["applied"] == ranks[1].kept["ledger"]["applied"] == 3


@st.composite
def assignments(draw: st.DrawFn) -> list[Deal]:
    """Windows of up to two ranks with up to three micro-batches of up to three samples; in each somebody has data."""
    micro_batch = st.lists(st.integers(0, len(RAGGED) - 1), min_size=1, max_size=3)
    rank = st.lists(micro_batch, max_size=3)
    deal = st.tuples(rank, rank).filter(any)
    return draw(st.lists(deal, min_size=1, max_size=6))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    windows=assignments(),
    weights=st.lists(st.sampled_from([0.0, 1.0, 2.0, 7.0]), min_size=len(RAGGED), max_size=len(RAGGED)),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    clip_norm=st.sampled_from([None, 0.05]),
    bad=st.dictionaries(st.integers(0, len(RAGGED) - 1), st.sampled_from([math.inf, math.nan, 1e38]), max_size=1),
    late=st.booleans(),
    on_host=st.booleans(),
)
def test_any_assignment_to_two_ranks_is_one_process(
    both: Both,
    windows: list[Deal],
    weights: list[float],
    precision: str,
    clip_norm: float | None,
    bad: dict[int, float],
    late: bool,
    on_host: bool,
) -> None:
    given = {"precision": precision, "clip_norm": clip_norm, "find_unused_parameters": late}
    job = Job(windows=windows, weights=weights, factors=bad, given=given, on_host=on_host)
    assert_equals_one_process(job, both(train, job))
