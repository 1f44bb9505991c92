"""A process under watch, and those that it starts: `multiprocessing`, and programs of this Python."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.utils.data._utils import worker

from halfstep.record.probing import Asked
from halfstep.record.programs import ASKED, followed, script_in
from halfstep.record.recorder import Recorder
from halfstep.record.running import Ending, Replayed, in_words
from halfstep.record.session import Session
from halfstep.record.termination import Termination
from halfstep.record.writing import Writer


@dataclass(eq=False)
class Process:
    """Heard from `begin` to its end, whatever ends it: what it heard is then left in the folder.

    Attributes:
        asked: what the probes are asked to do.
        folder: where all processes of the run leave what they heard.
        name: of its files there.
        finish: what remains to be done at the end; returns the exit code.
    """

    asked: Asked
    folder: Path
    name: str = field(default_factory=lambda: str(os.getpid()))
    finish: Callable[[Ending], int] = lambda ending: ending.code

    def __post_init__(self) -> None:
        self.pid, self.ended, self.lock = os.getpid(), False, threading.RLock()
        self.session, self.termination = Session(asked=self.asked), Termination(self.end)
        self.writer = Writer(self.session, self.folder, self.termination, self.name)

    def begin(self) -> None:
        """Put the hooks in, and follow what this process starts."""
        session = self.session
        self.termination.install()
        self.writer.begin()
        session.recorder.listeners.append(self.writer)
        session.start()
        session.patches.wrap(os, "_exit", self._leaving)
        session.patches.wrap(BaseProcess, "_bootstrap", self._forked)
        session.patches.wrap(BaseProcess, "start", self._starting)
        session.patches.wrap(subprocess.Popen, "__init__", lambda original: _running(original, session.recorder, self.folder))

    def end(self, ending: Ending) -> int:
        """Write what was heard, take the hooks out, and finish; once, whoever comes first."""
        self.termination.begun.set()
        with self.lock:
            if self.ended:
                return ending.code
            self.ended = True
            self.writer.end(ending)
            self.session.stop()
            code = self.finish(ending)
            sys.stdout.flush()
            sys.stderr.flush()
            self.termination.remove()
            return code

    def _leaving(self, original: Callable[[int], Any]) -> Callable[[int], Any]:
        def _exit(status: int) -> Any:
            if os.getpid() != self.pid:
                return original(status)
            return original(self.end(Ending(status, f"it left by os._exit({status})")))

        return _exit

    def _forked(self, original: Callable[..., int]) -> Callable[..., int]:
        def _bootstrap(process: Any, *args: Any, **kwargs: Any) -> int:
            self.session.stop()
            if _is_worker(process) or isinstance(getattr(process, "_target", None), Followed):
                return original(process, *args, **kwargs)
            return int(_heard(Process(self.asked, self.folder), lambda: original(process, *args, **kwargs)))

        return _bootstrap

    def _starting(self, original: Callable[..., None]) -> Callable[..., None]:
        def start(process: Any) -> None:
            method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
            target = process._target
            if method == "fork" or target is None or _is_worker(process):
                original(process)
                return
            process._target = Followed(target, self.asked, str(self.folder))
            try:
                original(process)
            finally:
                process._target = target

        return start


def _running(original: Callable[..., None], rec: Recorder, folder: Path) -> Callable[..., None]:
    def __init__(self: Any, args: Any, *rest: Any, **named: Any) -> None:  # noqa: N807
        plain = not rest[1:] and named.get("executable") is None and not named.get("shell")
        words = followed(args, folder) if plain else None
        original(self, args if words is None else words, *rest, **named)
        if words is None and rec.hears:
            with rec.safe:
                script = script_in(args)
                if script:
                    rec.unheard.setdefault(script, shlex.join([Path(args[0]).name, *map(str, args[1:])]))

    return __init__


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
        return _heard(Process(self.asked, Path(self.folder)), lambda: self.target(*args, **kwargs))


def _heard(process: Process, call: Callable[[], Any]) -> Any:
    process.begin()
    process.writer.watch()
    ending = Ending()
    try:
        return call()
    except Replayed as end:
        ending = end.ending
    except (Exception, KeyboardInterrupt) as error:
        ending = Ending(words=in_words(error))
        raise
    finally:
        process.end(ending)


def joined(folder: Path) -> Process:
    """The process of a program that was started by one under watch, heard from now on."""
    process = Process(pickle.loads((folder / ASKED).read_bytes()), folder)
    process.begin()
    process.writer.watch()
    return process


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
