"""When a rank does not come to meet the others: which one, and what it is doing.

Each rank has a thread that looks once a second whether somebody asks in the store through which the ranks met, and answers
where the main thread is. A rank whose wait ran out of time asks.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import weakref
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch

ASK = "halfstep/where"
POLL_S = 1.0
ANSWER_S = 10.0
WAITING = ("torch/distributed/", "torch/autograd/", "halfstep/distributed/")
"""Where a thread is that waits for the other ranks; a backward waits for DDP's reductions."""
WAITS = "waits for the others"


class Answering:
    """Answers where this rank's main thread is, as long as `owner` lives.

    Args:
        store: through which the ranks met.
        rank: this one.
        owner: the thread ends with it.
    """

    def __init__(self, store: Any, rank: int, owner: object) -> None:
        self._ended = threading.Event()
        arguments = (store, rank, weakref.ref(owner, lambda _: self._ended.set()), self._ended)
        self._thread = threading.Thread(target=_answer, args=arguments, name="halfstep whereabouts", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Answer no more."""
        self._ended.set()
        self._thread.join()


def _answer(store: Any, rank: int, owner: Any, ended: threading.Event) -> None:
    with suppress(RuntimeError):  # the store has ended
        while not ended.wait(POLL_S) and owner() is not None:
            if store.check([ASK]):
                store.set(f"{ASK}/{rank}", where())
                return


def where() -> str:
    """Where the main thread is, in words; "waits for the others" where it is in a collective."""
    innermost = sys._current_frames()[threading.main_thread().ident or 0]
    if any(part in innermost.f_code.co_filename for part in WAITING):
        return WAITS
    frame: FrameType | None = innermost
    while frame is not None and not _is_the_users(frame.f_code.co_filename):
        frame = frame.f_back
    found = innermost if frame is None else frame
    return f"{found.f_code.co_filename}, line {found.f_lineno}, in {found.f_code.co_name}"


def _is_the_users(file: str) -> bool:
    path = Path(file)
    packages = (Path(torch.__file__).parent, Path(__file__).parents[1], Path(sysconfig.get_path("stdlib")))
    return not any(package in path.parents for package in packages) and not file.startswith("<")


def missing_ranks(store: Any, own: int, size: int) -> str | None:
    """The sentence about ranks that did not come, after rank `own` waited too long; None where some do not answer."""
    others = [rank for rank in range(size) if rank != own]
    store.set(ASK, "asked")
    store.wait([f"{ASK}/{rank}" for rank in others], timedelta(seconds=ANSWER_S))
    answers = {rank: str(store.get(f"{ASK}/{rank}").decode()) for rank in others}
    busy = {rank: answer for rank, answer in answers.items() if answer != WAITS}
    if not busy:
        return None
    told = "; ".join(f"rank {rank} is in {answer}" for rank, answer in busy.items())
    return f"{_ranks(list(busy))} did not come to meet the others in time: {told}."


def _ranks(numbers: list[int]) -> str:
    return f"Rank {numbers[0]}" if len(numbers) == 1 else f"Ranks {', '.join(map(str, numbers))}"
