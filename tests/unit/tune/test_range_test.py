"""A range test says where a loss falls and where it breaks, and nothing that it did not see."""

from __future__ import annotations

import math
from collections.abc import Sequence

from halfstep.bench.row import Row, Trial
from halfstep.config.options import Precision
from halfstep.tune.range_test import RISE, Range, conclusion, range_test, read

UPDATES = 61
RATES = [1e-3 * RISE ** (2 * number / (UPDATES - 1) - 1) for number in range(UPDATES)]


def bowl(updates: int = UPDATES) -> list[float]:
    """Level until the 20th update, falling to the 40th, then rising past where it began."""
    return [4.0 - 0.1 * min(max(at - 20, 0), 20) + 0.3 * max(at - 40, 0) for at in range(updates)]


def test_where_the_loss_falls_is_lowest_and_breaks() -> None:
    found = read(bowl(), 1e-3, UPDATES)
    assert found.steepest in RATES[21:40]
    assert found.lowest in RATES[39:42]
    assert found.above in RATES[46:50]


def test_a_run_that_broke_off_ended_where_it_broke() -> None:
    assert read(bowl(44), 1e-3, UPDATES).above == RATES[44]
    assert read([*bowl(44), math.nan, 1.0], 1e-3, UPDATES).above == RATES[44]
    assert read([], 1e-3, UPDATES) == Range(steepest=None, lowest=RATES[0], above=RATES[0])


def test_what_never_breaks_and_never_falls_is_said_so() -> None:
    falling = read([4.0 - 0.01 * at for at in range(UPDATES)], 1e-3, UPDATES)
    assert falling.above is None
    assert "never rose above where it began, up to 0.03" in conclusion([falling], 1e-3)
    assert read([1.0] * UPDATES, 1e-3, UPDATES).steepest is None


def test_the_configured_rate_is_set_beside_the_first_rate_that_broke() -> None:
    runs = [Range(steepest=2e-3, lowest=4e-3, above=8e-3), Range(steepest=1e-3, lowest=5e-3, above=None)]
    assert conclusion(runs, 1e-3) == (
        "Range test: while the rate rises, the loss falls fastest at 0.0015 (0.001 to 0.002), "
        "is lowest at 0.0045 (0.004 to 0.005); the configured 0.001 is 0.67 times the former; "
        "is above where it began from 0.008 on, in 1 of 2 runs."
    )
    assert "the configured one is not below that: choose a lower one" in conclusion(runs, 1e-2)


def test_each_seed_is_one_run_with_a_course_of_its_own() -> None:
    asked: list[Sequence[str]] = []

    def once(settings: Sequence[str], rise: float) -> Trial:
        asked.append(settings)
        assert rise == RISE
        return Trial(losses=tuple(bowl()))

    row = Row(precision=Precision.FP32, micro=2, accumulate=1)
    found = range_test(row, 1e-3, updates=UPDATES, runs=2, run=once, told=lambda sentence: None)
    assert len(found) == 2
    assert [settings[-1] for settings in asked] == ["run.seed=0", "run.seed=1"]
    assert all("scheduler.name=constant" in settings for settings in asked)
