"""Runs a script under watch, whatever its end, and hands what all its processes heard to whoever reports."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.distributed.env import launch_name, world
from halfstep.record.probing import Asked
from halfstep.record.processes import Writer, children, follow, read, reporting, wait_for_children
from halfstep.record.running import Ending, check, run
from halfstep.record.session import Session
from halfstep.record.telling import Heard

Report = Callable[[Ending, list[Heard]], int]
"""Reports, and returns the exit code."""


def watch(target: str, args: list[str], *, module: bool, report: Report, asked: Asked | None = None) -> int:
    """Run a script, or a module, to its end and report.

    Under a launcher every rank calls this; one of them reports for all.

    Args:
        target: path of the script, or name of the module.
        args: its arguments.
        module: whether it is a module.
        report: called once, by one process.
        asked: what the probes are asked to do.

    Raises:
        UsageError: There is no such script.
    """
    check(target, module=module)
    watching = _Watching(report, Session(asked=asked or Asked()))
    watching.begin()
    return watching.end(run(target, args, module=module))


@dataclass
class _Watching:
    report: Report
    session: Session
    launch: str | None = field(default_factory=launch_name)
    pid: int = field(default_factory=os.getpid)
    others: set[int] = field(default_factory=children)
    ended: bool = False

    def begin(self) -> None:
        self.folder = self._folder()
        place = world()
        name = str(place.rank) if self.launch is not None else str(self.pid)
        self.writer = Writer(self.session, self.folder, name)
        self.session.recorder.listeners.append(self.writer)
        self.session.start()
        follow(self.session, self.folder)
        self.session.patches.wrap(os, "_exit", self._leaving)
        if self.launch is not None:
            self.session.meter.joined_group(place.rank, place.size)
            self.writer.watch()

    def _folder(self) -> Path:
        if self.launch is None:
            return Path(tempfile.mkdtemp(prefix="halfstep-watch-"))
        safe = re.sub(r"\W+", "-", f"{getpass.getuser()}-{self.launch}")
        folder = Path(tempfile.gettempdir()) / f"halfstep-watch-{safe}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _leaving(self, original: Callable[[int], Any]) -> Callable[[int], Any]:
        def _exit(status: int) -> Any:
            if os.getpid() != self.pid:
                return original(status)
            code = self.end(Ending(status, f"it left by os._exit({status})"))
            sys.stdout.flush()
            sys.stderr.flush()
            return original(code)

        return _exit

    def end(self, ending: Ending) -> int:
        """Stop hearing, join the processes, and report if it is ours to report."""
        if self.ended:
            return ending.code
        self.ended = True
        if not ending.words:
            wait_for_children(self.others)
        self.writer.end(ending.words)
        self.session.stop()
        sys.stdout.flush()
        sys.stderr.write(ending.said)
        place = world()
        if self.launch is not None and not reporting(self.folder, place.rank, place.size):
            return ending.code
        heard = read(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.report(ending, heard)
