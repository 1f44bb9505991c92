"""How many sequences a text has, and how many updates a run will be."""

from __future__ import annotations

import pytest

from halfstep.config.facts import Cut
from halfstep.config.horizon import num_windows, planned_updates
from halfstep.config.options import Tail
from halfstep.config.run import BatchRun, LimitsRun


def planned(tail: Tail = Tail.STEP, **limits: int | float) -> int | None:
    asked = {"updates": None, "epochs": None, "tokens": None, "minutes": None, **limits}
    batch = BatchRun(global_=4, micro=2, tail=tail)
    return planned_updates(LimitsRun(**asked), batch, Cut(sequences=10, predicted=80))  # type: ignore[arg-type]


@pytest.mark.parametrize(("tokens", "windows"), [(0, 0), (1, 0), (2, 1), (9, 1), (10, 2), (17, 2), (18, 3)])
def test_every_token_but_the_first_is_in_exactly_one_sequence(tokens: int, windows: int) -> None:
    assert num_windows(tokens, 9) == windows


def test_the_first_limit_counts() -> None:
    assert planned(updates=7, epochs=1) == 3
    assert planned(updates=2, epochs=1) == 2


def test_tokens_are_counted_in_updates() -> None:
    assert planned(tokens=33) == 2


def test_only_the_clock_leaves_the_number_of_updates_open() -> None:
    assert planned(minutes=1.0) is None


def test_the_tail_decides_how_many_updates_epochs_are() -> None:
    assert planned(Tail.STEP, epochs=2) == 6
    assert planned(Tail.DROP, epochs=2) == 4
    assert planned(Tail.CARRY, epochs=2) == 5
