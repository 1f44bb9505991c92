"""Warm-up, stable, decay."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.config.optimization import automatic_decay_updates
from halfstep.train.courses import warmup_stable_decay


def test_the_rate_rises_stays_and_falls() -> None:
    shares = [warmup_stable_decay(at, warmup=3, decay=4, planned=12, final_share=0.1) for at in range(14)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shares[3:8] == [1.0] * 5
    assert shares[8:12] == pytest.approx([1 - 0.9 * math.sqrt(way) for way in (0.25, 0.5, 0.75, 1.0)])
    assert shares[12] == shares[13] == pytest.approx(0.1)


@given(planned=st.integers(1, 300), warmup=st.integers(0, 300), final=st.floats(0, 1))
def test_the_rate_is_never_above_one_nor_below_its_end_and_the_plan_ends_at_its_end(
    planned: int, warmup: int, final: float
) -> None:
    decay = automatic_decay_updates(planned, warmup).value
    shares = [warmup_stable_decay(at, warmup=warmup, decay=decay, planned=planned, final_share=final) for at in range(planned)]
    assert all(0 <= share <= 1 for share in shares)
    after = shares[warmup:]
    assert after == sorted(after, reverse=True)
    if decay:
        assert shares[-1] == pytest.approx(final)
