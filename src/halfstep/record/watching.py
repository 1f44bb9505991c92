"""Runs a script under watch, whatever its end, and hands what all its processes heard to whoever reports."""

from __future__ import annotations

import getpass
import os
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from halfstep.distributed.env import launch_name, world
from halfstep.errors import UsageError
from halfstep.record.probing import Asked
from halfstep.record.processes import Process, children, wait_for_children
from halfstep.record.programs import ASKED
from halfstep.record.running import Ending, check, run
from halfstep.record.telling import Heard
from halfstep.record.writing import ask, read, replayed, reporting

Report = Callable[[Ending, list[Heard]], int]
"""Reports, and returns the exit code; under a launcher it stays the script's, since another would fail the launch."""


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
    watching = _Watching(asked or Asked(), report)
    others = children()
    watching.process.begin()
    if watching.launch is not None:
        place = world()
        watching.process.session.meter.joined_group(place.rank, place.size)
        watching.process.writer.watch()
    ending = run(target, args, module=module)
    if not ending.words:
        wait_for_children(others)
    return watching.process.end(ending)


class _Watching:
    """The process that the command is: it reports for all, or waits for the one that does."""

    def __init__(self, asked: Asked, report: Report) -> None:
        self.report, self.launch, self.folder = report, launch_name(), _folder()
        name = str(os.getpid()) if self.launch is None else str(world().rank)
        (self.folder / ASKED).write_bytes(pickle.dumps(asked))
        self.process = Process(asked, self.folder, name, self.finish)

    def finish(self, ending: Ending) -> int:
        """Join the processes, and report if it is ours to report."""
        sys.stdout.flush()
        sys.stderr.write(ending.said)
        place = world()
        if self.launch is None:
            ask(self.folder)
        elif not reporting(self.folder, place.rank, place.size):
            return ending.code
        heard, ending = read(self.folder), replayed(self.folder) or ending
        shutil.rmtree(self.folder, ignore_errors=True)
        code = self.report(ending, heard)
        return code if self.launch is None else ending.code


def _folder() -> Path:
    """Where the processes of this run leave what they heard; ranks of one launch share it."""
    launch = launch_name()
    if launch is None:
        return Path(tempfile.mkdtemp(prefix="halfstep-watch-"))
    safe = re.sub(r"\W+", "-", f"{getpass.getuser()}-{launch}")
    folder = Path(tempfile.gettempdir()) / f"halfstep-watch-{safe}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
        raise UsageError(
            f"{folder} belongs to another user, and what lies there is not trusted: set TMPDIR to a folder of yours."
        )
    return folder
