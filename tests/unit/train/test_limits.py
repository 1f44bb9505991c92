"""When a run ends."""

from __future__ import annotations

import signal

import pytest

from halfstep.config.run import LimitsRun
from halfstep.distributed import Group, World
from halfstep.train.interruption import Interruption, interruptible
from halfstep.train.limits import Limits, Stop


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def limits(planned: int | None = None, **asked: int | float) -> Limits:
    values = {"updates": None, "epochs": None, "tokens": None, "minutes": None, **asked}
    return Limits(LimitsRun(**values), planned, window_tokens=100)  # type: ignore[arg-type]


def stop(interruption: Interruption, minutes: float | None, clock: Clock) -> Stop:
    return Stop(interruption, minutes, Group(World()), clock)


def test_the_number_of_applied_updates_ends_a_run() -> None:
    assert limits(updates=3).reached(2, 10**9) is None
    assert limits(updates=3).reached(3, 0) == "3 updates were applied"
    assert limits(updates=1).reached(1, 0) == "1 update was applied"


def test_tokens_end_a_run() -> None:
    assert limits(tokens=1000).reached(10, 999) is None
    assert limits(tokens=1000).reached(10, 1000) == "1,000 tokens were seen"


def test_an_update_is_read_at_once_where_it_may_be_the_last() -> None:
    assert limits(updates=3).may_be_last(applied=2, tokens=0)
    assert limits(tokens=1000).may_be_last(applied=0, tokens=900)
    assert not limits(tokens=1000).may_be_last(applied=0, tokens=899)


def test_how_much_is_done_follows_the_limit_that_comes_first() -> None:
    assert limits(planned=10, updates=10, minutes=1.0).done(5, 0, elapsed_s=6.0) == 0.5
    assert limits(planned=10, updates=10, minutes=1.0).done(1, 0, elapsed_s=30.0) == 0.5
    assert limits().done(5, 100, 9.0) == 0.0


def test_the_clock_ends_a_run() -> None:
    clock = Clock()
    stopping = stop(Interruption(), 0.5, clock)
    assert stopping.reached() is None
    clock.now = 30.0
    assert stopping.reached() == "0.5 minutes are over"
    assert stopping.signal is None


@pytest.mark.parametrize(("number", "words"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_ends_a_run_after_the_update(number: signal.Signals, words: str) -> None:
    with interruptible() as interruption:
        stopping = stop(interruption, None, Clock())
        assert stopping.reached() is None
        signal.raise_signal(number)
        assert stopping.reached() == words
        assert stopping.signal is number


def test_signals_belong_to_others_again_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with interruptible():
        pass
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_second_ctrl_c_does_not_wait() -> None:
    clock = Clock()
    interruption = Interruption(clock)
    interruption.hear(signal.SIGINT, None)
    clock.now = 2.0
    with pytest.raises(KeyboardInterrupt):
        interruption.hear(signal.SIGINT, None)


def test_a_signal_that_a_launcher_passes_on_is_no_second_one() -> None:
    clock = Clock()
    interruption = Interruption(clock)
    interruption.hear(signal.SIGINT, None)
    clock.now = 0.1
    interruption.hear(signal.SIGINT, None)
    assert interruption.signal is signal.SIGINT
