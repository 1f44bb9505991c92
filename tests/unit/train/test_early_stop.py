"""A run ends when its held-out data are predicted no better any more."""

from __future__ import annotations

from halfstep.train.early_stop import EarlyStop
from halfstep.train.record import EvaluationRecord


def record(loss: float, *, best: bool) -> EvaluationRecord:
    return EvaluationRecord(update=1, loss=loss, seconds=0.0, best=best, accuracy=0.5)


def test_patience_counts_looks_in_a_row() -> None:
    stop = EarlyStop(2)
    looks = [record(3.0, best=True), record(2.0, best=True), record(2.5, best=False), record(1.5, best=True)]
    assert [stop.look(look) for look in [*looks, record(1.6, best=False)]] == [None] * 5
    assert stop.look(record(1.5, best=False)) == "2 looks in a row were not better than loss 1.500, accuracy 50.00%"


def test_a_run_without_a_loss_that_is_a_number_ends() -> None:
    stop = EarlyStop(1)
    assert stop.look(record(float("nan"), best=False)) == "1 looks in a row were not better than a loss that is a number"
