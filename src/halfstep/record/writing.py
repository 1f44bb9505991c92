"""What every process of a run heard, left in a folder, and read there by the one that reports.

A process writes when it ends, when nothing has happened for a while (it may hang, and be killed), when it is asked to, and now
and then: it may be killed without a word.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.record.recorder import Listener
from halfstep.record.running import Ending
from halfstep.record.session import Session
from halfstep.record.telling import Heard
from halfstep.record.termination import Termination

IDLE_S = 0.7
"""Nothing was heard for this long: what was heard until then is written."""
FIRST_S = 5.0
"""What was heard is written so long after the beginning, though updates go on."""
PATIENCE_S = 6.0
"""How long a rank that has ended waits for news of one that does nothing."""
ANSWER_S = 3.0
"""How long the process that ends early waits for the others to write."""
BEGUN, ALIVE, LATEST, FINAL, REPLAYED = ".begun", ".alive", ".latest", ".final", ".replayed"
CLAIM, REQUEST = "claim", "request"


@dataclass(eq=False)
class Writer(Listener):
    """Writes what a process heard; a watching thread does so when the process stands still."""

    session: Session
    folder: Path
    termination: Termination
    name: str = field(default_factory=lambda: str(os.getpid()))
    ended: bool = False
    begun_s: float = field(default_factory=time.monotonic)
    next_s: float = field(default_factory=lambda: time.monotonic() + FIRST_S)
    _watched: bool = False

    def joined_group(self, rank: int, size: int) -> None:
        """A rank may hang, and be killed: it is watched."""
        self.watch()

    def update_ended(self, optimizer: Any, scaler: Any) -> None:
        """Write after some seconds, and then whenever that time has doubled."""
        now = time.monotonic()
        if self._watched and now >= self.next_s:
            self.next_s = now + (now - self.begun_s)
            self.write("it was ended from outside", LATEST)

    def begin(self) -> None:
        """Say that this process is there."""
        self._leave(BEGUN, b"")

    def watch(self) -> None:
        """Begin to look, from a thread, whether the process stands still, is asked, or is ended."""
        if not self._watched:
            self._watched = True
            self.termination.wake()
            threading.Thread(target=self._look, name="halfstep-watch", daemon=True).start()

    def _look(self) -> None:
        written, before, answered = -1, -1, False
        while not self.ended:
            self.termination.wait(IDLE_S)
            heard = self.session.recorder.tape.heard
            asked = not answered and (self.folder / REQUEST).exists()
            if asked or heard == before != written:
                self.write("it still ran when the script ended" if asked else "it was ended from outside", LATEST)
                written, answered = heard, answered or asked
            elif heard != before:
                self._leave(ALIVE, b"")
            before = heard

    def end(self, ending: Ending) -> None:
        """Write for the last time."""
        self.ended = True
        if ending.replayed:
            self._leave(REPLAYED, pickle.dumps(ending))
        self.write(ending.words, FINAL)

    def write(self, words: str, kind: str) -> None:
        """Write what was heard."""
        with suppress(RuntimeError):  # the tape moved while it was read: the next look will do
            self._leave(kind, pickle.dumps(self.session.heard(words)))

    def _leave(self, kind: str, data: bytes) -> None:
        """Leave a file; a reader never sees half of it. Where the run was reported already, the folder is gone."""
        part = self.folder / f"{self.name}{kind}-{threading.get_ident()}.part"
        with suppress(FileNotFoundError):
            part.write_bytes(data)
            part.replace(self.folder / f"{self.name}{kind}")


def read(folder: Path) -> list[Heard]:
    """What every process wrote, the last of each; those that heard nothing are left out where others heard something."""
    finals = {path.stem: path for path in folder.glob(f"*{FINAL}")}
    latest = {path.stem: path for path in folder.glob(f"*{LATEST}")}
    heard: list[Heard] = [pickle.loads(path.read_bytes()) for _, path in sorted({**latest, **finals}.items())]
    return [process for process in heard if process.files or process.unheard or process.fault] or heard[:1]


def replayed(folder: Path) -> Ending | None:
    """How the process ended that ran a saved batch again; None where none did."""
    ended = next(iter(sorted(folder.glob(f"*{REPLAYED}"))), None)
    return pickle.loads(ended.read_bytes()) if ended is not None else None


def ask(folder: Path) -> None:
    """Have the processes that still run write what they heard until now, and wait for them a little."""
    since = time.time()
    (folder / REQUEST).touch()
    awaited = {path.stem for path in folder.glob(f"*{BEGUN}")}
    while time.time() - since < ANSWER_S:
        there = {path.stem for kind in (LATEST, FINAL) for path in folder.glob(f"*{kind}") if _is_news(path, kind, since)}
        if awaited <= there:
            break
        time.sleep(0.05)


def _is_news(path: Path, kind: str, since: float) -> bool:
    return kind == FINAL or path.stat().st_mtime >= since


def reporting(folder: Path, rank: int, size: int) -> bool:
    """Whether this rank, which has ended, is the one to report: rank 0, or another where rank 0 does not come to its end.

    Waits while the ranks that matter make progress.
    """
    awaited = {str(r) for r in range(size)} - {str(rank)} if rank == 0 else {"0"}
    seen, since = 0.0, time.monotonic()
    while not all((folder / f"{name}{FINAL}").exists() for name in awaited):
        news = _latest_news(folder)
        if news is None:
            return False  # another rank has reported and taken the folder away
        if news > seen:
            seen, since = news, time.monotonic()
        if time.monotonic() - since > PATIENCE_S:
            break
        time.sleep(0.1)
    else:
        if rank != 0:
            return False
    return _claimed(folder)


def _latest_news(folder: Path) -> float | None:
    """When a process last left something; None where the folder is gone. A file may get its final name while it is looked at."""
    try:
        paths = list(folder.iterdir())
    except FileNotFoundError:
        return None
    news = 0.0
    for path in paths:
        with suppress(FileNotFoundError):
            news = max(news, path.stat().st_mtime)
    return news


def _claimed(folder: Path) -> bool:
    try:
        (folder / CLAIM).touch(exist_ok=False)
    except (FileExistsError, FileNotFoundError):
        return False
    return True
