"""The division of a global batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.config.batch import automatic_global, check_division, largest_divisor
from halfstep.errors import ConfigError


def fault(**division: int) -> str:
    with pytest.raises(ConfigError) as error:
        check_division(**division)
    return str(error.value)


def test_a_batch_that_does_not_divide_says_what_would() -> None:
    assert fault(global_batch=100, micro=8, ranks=4) == (
        "`batch.global = 100` cannot be split over 4 ranks of 8: 100 / 32 is not whole. Use 96 or 128, or `batch.micro = 5`."
    )


def test_a_batch_that_no_micro_batch_divides_over_the_ranks_offers_none() -> None:
    assert fault(global_batch=3, micro=1, ranks=2) == (
        "`batch.global = 3` cannot be split over 2 ranks of 1: 3 / 2 is not whole. Use 2 or 4."
    )


def test_a_batch_smaller_than_a_micro_batch_offers_the_next_size() -> None:
    assert fault(global_batch=3, micro=8, ranks=1) == (
        "`batch.global = 3` cannot be split into micro-batches of 8: 3 / 8 is not whole. Use 8, or `batch.micro = 3`."
    )


@given(number=st.integers(1, 500), most=st.integers(1, 500))
def test_the_largest_divisor_divides_and_none_between_does(number: int, most: int) -> None:
    divisor = largest_divisor(number, at_most=most)
    assert number % divisor == 0
    assert divisor <= most
    assert not any(number % between == 0 for between in range(divisor + 1, min(most, number) + 1))


@given(
    micro=st.none() | st.integers(1, 16),
    ranks=st.integers(1, 8),
    sequence_length=st.integers(2, 8192),
    windows=st.integers(1, 10_000),
)
def test_the_automatic_batch_always_divides(micro: int | None, ranks: int, sequence_length: int, windows: int) -> None:
    size = automatic_global(micro=micro, ranks=ranks, sequence_length=sequence_length, windows=windows).value
    check_division(global_batch=size, micro=micro or 1, ranks=ranks)
