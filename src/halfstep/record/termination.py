"""SIGTERM, by which batch systems and launchers end a job: what was heard is told, and the process dies of it all the same."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from signal import SIG_DFL, SIGTERM, getsignal, set_wakeup_fd
from signal import signal as set_handler
from typing import Any

from halfstep.record.patches import Patches
from halfstep.record.running import Ending

ENDING = Ending(143, "it was ended by SIGTERM")
GRACE_S = 2.0
"""So long may a call of the main thread take to come back before another thread reports in its place."""


class Termination:
    """Ends a process that was sent SIGTERM, unless the script handles that itself, and hides from the script that it does."""

    def __init__(self, end: Callable[[Ending], int]) -> None:
        self.begun = threading.Event()
        """The process ends already, for this reason or another: it is let finish."""
        self._end = end
        self._patches = Patches()
        self._pipe: tuple[int, int] | None = None

    def install(self) -> None:
        """Take the place of the default action."""
        if threading.current_thread() is threading.main_thread() and getsignal(SIGTERM) is SIG_DFL:
            set_handler(SIGTERM, self._handle)
            self._patches.wrap(signal, "signal", self._setting)
            self._patches.wrap(signal, "getsignal", self._getting)
            self._patches.wrap(os, "fork", self._forking)

    def remove(self) -> None:
        """Restore the default action."""
        self._patches.undo()
        if threading.current_thread() is not threading.main_thread():
            return
        if getsignal(SIGTERM) == self._handle:
            set_handler(SIGTERM, SIG_DFL)
        if self._pipe is not None:
            set_wakeup_fd(-1)
            self._pipe = None

    def wake(self) -> None:
        """From now on `wait` is told of the signal while the main thread stands in a call, too."""
        if threading.current_thread() is threading.main_thread() and getsignal(SIGTERM) == self._handle:
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            before = set_wakeup_fd(writing, warn_on_full_buffer=False)
            if before == -1:
                self._pipe = reading, writing
            else:
                set_wakeup_fd(before)

    def wait(self, timeout_s: float) -> None:
        """From another thread: wait, and end the process if it is sent the signal and its main thread cannot."""
        if self._pipe is None:
            self.begun.wait(timeout_s)
            return
        readable = select.select([self._pipe[0]], [], [], timeout_s)[0]
        sent = readable and SIGTERM in os.read(self._pipe[0], 4096) and getsignal(SIGTERM) == self._handle
        if sent and not self.begun.wait(GRACE_S):
            self._end(ENDING)
            os._exit(ENDING.code)

    def _handle(self, number: int, frame: Any) -> None:
        if self.begun.is_set():
            return
        try:
            self._end(ENDING)
        except Exception as error:  # whatever the report meets: the process must die
            sys.stderr.write(f"halfstep: what was heard could not be told: {type(error).__name__}: {error}\n")
        set_handler(SIGTERM, SIG_DFL)
        os.kill(os.getpid(), SIGTERM)

    def _setting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def signal(signalnum: Any, handler: Any) -> Any:
            ours = signalnum == SIGTERM and handler is SIG_DFL
            return self._shown(original(signalnum, self._handle if ours else handler))

        return signal

    def _getting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda signalnum: self._shown(original(signalnum))

    def _shown(self, handler: Any) -> Any:
        return SIG_DFL if handler == self._handle else handler

    def _forking(self, original: Callable[[], int]) -> Callable[[], int]:
        def fork() -> int:
            pid = original()
            if pid == 0:
                self.remove()
            return pid

        return fork
