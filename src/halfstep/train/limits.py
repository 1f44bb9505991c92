"""When a run ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from halfstep.config.run import LimitsRun
from halfstep.distributed import Group
from halfstep.distributed.group import Pending
from halfstep.train.interruption import Interruption


class Limits:
    """The limits that updates and tokens reach, and how much of the run is behind them.

    Args:
        asked: the limits.
        planned_updates: applied updates until the first of them; `None` where only the clock ends the run.
        window_tokens: tokens of a full update.
    """

    def __init__(self, asked: LimitsRun, planned_updates: int | None, window_tokens: float) -> None:
        self._asked, self._planned, self._window_tokens = asked, planned_updates, window_tokens

    def may_be_last(self, applied: int, tokens: int) -> bool:
        """Whether one update more than these could reach a limit."""
        return self.reached(applied + 1, tokens + self._window_tokens) is not None

    def reached(self, applied: int, tokens: float) -> str | None:
        """The limit that is reached, in words."""
        if self._asked.updates is not None and applied >= self._asked.updates:
            return "1 update was applied" if applied == 1 else f"{applied:,} updates were applied"
        if self._asked.tokens is not None and tokens >= self._asked.tokens:
            return f"{tokens:,} tokens were seen"
        return None

    def done(self, applied: int, tokens: int, elapsed_s: float) -> float:
        """The share of the run that is behind, by the limit that comes first; 0 where nobody knows."""
        shares = [0.0]
        if self._planned is not None:
            shares.append(applied / self._planned)
        if self._asked.tokens is not None:
            shares.append(tokens / self._asked.tokens)
        if self._asked.minutes is not None:
            shares.append(elapsed_s / (60 * self._asked.minutes))
        return min(1.0, max(shares))


class Stop:
    """What ends a run from outside, a signal or the clock, on any rank: all ranks hear of it in the same update.

    Args:
        interruption: the signal that this process got.
        minutes: the limit by the clock.
        group: all ranks. Between several, what was asked during an update is known at the end of the next.
        spent_s: what the run has used of its minutes before it was resumed.
        clock: seconds, ever growing.
    """

    def __init__(
        self,
        interruption: Interruption,
        minutes: float | None,
        group: Group,
        clock: Callable[[], float] = time.monotonic,
        *,
        spent_s: float = 0.0,
    ) -> None:
        self._interruption, self._minutes, self._group, self._clock = interruption, minutes, group, clock
        self._ends = None if minutes is None else clock() + 60 * minutes - spent_s
        self._asked: Pending | None = None
        self.signal: signal.Signals | None = None
        """The signal that ended the run."""
        self.save = False
        """Whether some rank wants the run to be saved now."""

    def reached(self, *, save: bool = False) -> str | None:
        """What ends the run, in words. Every rank must call it, once an update, and says whether it wants the run saved."""
        late = self._ends is not None and self._clock() >= self._ends
        asked = self._group.start_max([float(self._interruption.signal or 0), float(late), float(save)])
        answer, self._asked = (asked, None) if self._group.alone else (self._asked, asked)
        if answer is None:
            return None
        number, is_late, self.save = answer.wait().tolist()
        if number:
            self.signal = signal.Signals(int(number))
            return "Ctrl-C" if self.signal is signal.SIGINT else self.signal.name
        return f"{self._minutes:g} minutes are over" if is_late else None

    def close(self) -> None:
        """Wait for the last agreement, which the other ranks are in too."""
        if self._asked is not None:
            self._asked.wait()
            self._asked = None
