"""Ctrl-C and SIGTERM, heard at the end of an update."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

HEARD = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """The signal that asked the run to end; `None` as long as none did."""

    __slots__ = ("signal",)

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Note a signal. A second Ctrl-C does not wait for the end of the update."""
        if self.signal is signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number)


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
