import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.measure.stats import Measured, paired_ratio, summarize

SAMPLES = st.lists(st.floats(min_value=1e-6, max_value=1e6), min_size=4, max_size=30)


@given(SAMPLES)
def test_summary_is_numpys_median_and_quartiles(samples: list[float]) -> None:
    low, value, high = np.quantile(samples, [0.25, 0.5, 0.75])
    found = summarize(samples, "s")
    assert (found.low, found.value, found.high) == pytest.approx((low, value, high))
    assert (found.count, found.unit) == (len(samples), "s")


def test_fewer_than_four_samples_spread_from_least_to_most() -> None:
    found = summarize([3.0, 1.0, 2.0], "s")
    assert (found.low, found.value, found.high, found.spread) == (1.0, 2.0, 3.0, 2.0)


def test_one_interrupted_run_of_nine_moves_neither_median_nor_spread() -> None:
    calm = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0, 1.0]
    assert summarize([*calm, 100.0], "s").high < 1.1


def test_no_samples_have_no_median() -> None:
    with pytest.raises(ValueError, match="no median for empty data"):
        summarize([], "s")


def test_paired_ratio_takes_out_what_slows_both() -> None:
    ratio = paired_ratio([1.0, 10.0, 2.0, 4.0], [2.0, 20.0, 4.0, 8.0])
    assert (ratio.value, ratio.spread, ratio.unit) == (0.5, 0.0, "")


def test_paired_ratio_needs_as_many_of_one_as_of_the_other() -> None:
    with pytest.raises(ValueError, match="shorter"):
        paired_ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("samples", "unit", "text"),
    [
        ([0.0021, 0.0020, 0.0022, 0.0021], "s", "2.10 ms (2.08 to 2.12, 4 runs)"),
        ([0.0000034], "s", "3.40 us once"),
        ([1.5, 1.25, 1.75], "s", "1.50 s (1.25 to 1.75, 3 runs)"),
        ([0.0029, 0.0028, 0.0030], "TFLOP/s", "0.00290 TFLOP/s (0.00280 to 0.00300, 3 runs)"),
        ([812.3, 799.6, 820.1], "TFLOP/s", "812 TFLOP/s (800 to 820, 3 runs)"),
        ([0.92, 0.91, 0.93], "", "0.920 (0.910 to 0.930, 3 runs)"),
        ([1.5e-9], "", "1.50e-09 once"),
        ([0.0], "", "0.00 once"),
        ([3 * 2**20], "B", "3.00 MiB once"),
    ],
)
def test_text_has_unit_count_and_spread(samples: list[float], unit: str, text: str) -> None:
    assert str(summarize(samples, unit)) == text


def test_a_measurement_cannot_be_changed() -> None:
    measured = Measured(value=1.0, low=1.0, high=1.0, count=1, unit="s")
    with pytest.raises(dataclasses.FrozenInstanceError):
        measured.value = 2.0  # type: ignore[misc]
