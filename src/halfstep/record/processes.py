"""Follows the processes that a script starts, and joins what they heard.

A process writes what it heard into a folder: when it ends, when nothing has happened for a while (it may hang, and be killed),
and after its first updates. Whoever reports reads the folder.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.utils.data._utils import worker

from halfstep.record.places import is_library
from halfstep.record.probing import Asked
from halfstep.record.recorder import Listener, Recorder
from halfstep.record.running import in_words
from halfstep.record.session import Session
from halfstep.record.telling import Heard

IDLE_S = 0.7
"""Nothing was heard for this long: what was heard until then is written."""
PATIENCE_S = 6.0
"""How long a rank that has ended waits for news of one that does nothing."""
FINAL, LATEST, CLAIM = ".final", ".latest", "claim"


@dataclass(eq=False)
class Writer(Listener):
    """Writes what a process heard; a watching thread does so when the process stands still."""

    session: Session
    folder: Path
    name: str = field(default_factory=lambda: str(os.getpid()))
    ended: bool = False
    _watched: bool = False

    def joined_group(self, rank: int, size: int) -> None:
        """A rank may hang, and be killed: it is watched."""
        self.watch()

    def watch(self) -> None:
        """Begin to look, from a thread, whether the process stands still."""
        if not self._watched:
            self._watched = True
            threading.Thread(target=self._look, name="halfstep-watch", daemon=True).start()

    def _look(self) -> None:
        written, before = -1, -1
        while not self.ended:
            time.sleep(IDLE_S)
            heard = self.session.recorder.tape.heard
            if heard == before != written:
                self.write("it was ended from outside", LATEST)
                written = heard
            elif heard != before:
                with suppress(FileNotFoundError):  # another rank has reported and taken the folder away
                    (self.folder / f"{self.name}.alive").touch()
            before = heard

    def end(self, words: str = "") -> None:
        """Write for the last time."""
        if not self.ended:
            self.ended = True
            self.write(words, FINAL)

    def write(self, words: str, kind: str) -> None:
        """Write what was heard; a reader never sees half a file."""
        try:
            data = pickle.dumps(self.session.heard(words))
        except RuntimeError:
            return  # the tape moved while it was read: the next look will do
        part = self.folder / f"{self.name}.part"
        part.write_bytes(data)
        part.replace(self.folder / f"{self.name}{kind}")


def follow(session: Session, folder: Path) -> None:
    """Follow what this process starts through `multiprocessing`, and end with it if it leaves by `os._exit`."""
    session.patches.wrap(BaseProcess, "_bootstrap", lambda original: _forked(original, session, folder))
    session.patches.wrap(BaseProcess, "start", lambda original: _starting(original, session.asked, folder))
    session.patches.wrap(subprocess.Popen, "__init__", lambda original: _running(original, session.recorder))


def _running(original: Callable[..., None], rec: Recorder) -> Callable[..., None]:
    """Programs are not followed: that one was started which may train is said."""

    def __init__(self: Any, args: Any, *rest: Any, **named: Any) -> None:  # noqa: N807
        original(self, args, *rest, **named)
        if rec.hears and isinstance(args, (list, tuple)):
            with rec.safe:
                words = [os.fspath(word) for word in args if isinstance(word, (str, os.PathLike))]
                script = next((word for word in words if word.endswith(".py")), "")
                if script and not is_library(os.path.abspath(script)):
                    rec.unheard.setdefault(script, f"{Path(words[0]).name} {script}")

    return __init__


def _forked(original: Callable[..., int], session: Session, folder: Path) -> Callable[..., int]:
    def _bootstrap(self: Any, *args: Any, **kwargs: Any) -> int:
        session.stop()
        if _is_worker(self) or isinstance(getattr(self, "_target", None), Followed):
            return original(self, *args, **kwargs)
        return int(_followed(session.asked, folder, lambda: original(self, *args, **kwargs)))

    return _bootstrap


def _starting(original: Callable[..., None], asked: Asked, folder: Path) -> Callable[..., None]:
    def start(self: Any) -> None:
        method = getattr(self, "_start_method", None) or multiprocessing.get_start_method()
        target = self._target
        if method == "fork" or target is None or _is_worker(self):
            original(self)
            return
        self._target = Followed(target, asked, str(folder))
        try:
            original(self)
        finally:
            self._target = target

    return start


def _is_worker(process: Any) -> bool:
    return getattr(process, "_target", None) is worker._worker_loop


@dataclass(frozen=True, slots=True)
class Followed:
    """What a spawned process runs instead of its target: the target, heard."""

    target: Callable[..., Any]
    asked: Asked
    folder: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the target."""
        return _followed(self.asked, Path(self.folder), lambda: self.target(*args, **kwargs))


def _followed(asked: Asked, folder: Path, call: Callable[[], Any]) -> Any:
    session = Session(asked=asked)
    writer = Writer(session, folder)
    session.recorder.listeners.append(writer)
    session.start()
    follow(session, folder)
    session.patches.wrap(os, "_exit", lambda original: _leaving(original, writer))
    words = ""
    try:
        return call()
    except Exception as error:
        words = in_words(error)
        raise
    finally:
        writer.end(words)
        session.stop()


def _leaving(original: Callable[[int], Any], writer: Writer) -> Callable[[int], Any]:
    def _exit(status: int) -> Any:
        writer.end()
        return original(status)

    return _exit


def children() -> set[int]:
    """The processes that `multiprocessing` has started from this one, by number."""
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


def wait_for_children(before: Collection[int]) -> None:
    """Wait for the processes that the script started and that Python itself would wait for.

    Args:
        before: those that were there before the script, which are not its own.
    """
    for child in multiprocessing.active_children():
        if not child.daemon and child.pid not in before:
            child.join()


def read(folder: Path) -> list[Heard]:
    """What every process wrote, the last of each."""
    finals = {path.stem: path for path in folder.glob(f"*{FINAL}")}
    latest = {path.stem: path for path in folder.glob(f"*{LATEST}")}
    return [pickle.loads(path.read_bytes()) for _, path in sorted({**latest, **finals}.items())]


def reporting(folder: Path, rank: int, size: int) -> bool:
    """Whether this rank, which has ended, is the one to report: rank 0, or another where rank 0 does not come to its end.

    Waits while the ranks that matter make progress.
    """
    awaited = {str(r) for r in range(size)} - {str(rank)} if rank == 0 else {"0"}
    seen, since = 0.0, time.monotonic()
    while not all((folder / f"{name}{FINAL}").exists() for name in awaited):
        try:
            news = max((path.stat().st_mtime for path in folder.iterdir()), default=0.0)
        except FileNotFoundError:
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


def _claimed(folder: Path) -> bool:
    try:
        (folder / CLAIM).touch(exist_ok=False)
    except (FileExistsError, FileNotFoundError):
        return False
    return True
