"""Ctrl-C and SIGTERM, heard at the end of an update."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

HEARD = (signal.SIGINT, signal.SIGTERM)
SAME_KEY_PRESS_S = 1.0
"""A launcher passes on the signal that the terminal sent to everybody."""


class Interruption:
    """The signal that asked the run to end; `None` as long as none did."""

    __slots__ = ("_clock", "_heard", "signal")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._heard = clock, 0.0
        self.signal: signal.Signals | None = None

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Note a signal. A second Ctrl-C does not wait for the end of the update."""
        now = self._clock()
        if self.signal is not None and number == signal.SIGINT and now - self._heard > SAME_KEY_PRESS_S:
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal, self._heard = signal.Signals(number), now

    def comes_within(self, seconds: float) -> bool:
        """Wait so long for a signal, and say whether one came."""
        ends = self._clock() + seconds
        while self.signal is None and self._clock() < ends:
            time.sleep(0.05)
        return self.signal is not None


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Hear Ctrl-C and SIGTERM below this, and give the signals back to whom they belonged."""
    interruption = Interruption()
    before: dict[signal.Signals, Any] = {number: signal.signal(number, interruption.hear) for number in HEARD}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
