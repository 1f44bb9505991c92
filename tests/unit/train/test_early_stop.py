"""A run ends when the held-out loss has stopped getting better."""

from __future__ import annotations

from halfstep.train.early_stop import EarlyStop


def test_patience_counts_looks_in_a_row() -> None:
    stop = EarlyStop(2)
    assert [stop.look(loss) for loss in (3.0, 2.0, 2.5, 1.5, 1.6)] == [None] * 5
    assert stop.look(1.5) == "2 looks in a row were not better than a held-out loss of 1.5000"


def test_a_gain_that_is_too_small_is_none() -> None:
    stop = EarlyStop(1, least_gain=0.1)
    assert stop.look(2.0) is None
    assert stop.look(1.95) == "1 looks in a row were not better by 0.1 than a held-out loss of 2.0000"


def test_nan_is_never_better() -> None:
    stop = EarlyStop(2)
    assert stop.look(float("nan")) is None
    assert stop.look(float("nan")) == "2 looks in a row were not better than a held-out loss of inf"
