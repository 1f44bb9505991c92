"""The door for the processes that a certificate starts: `python -m halfstep.certify TASK.json`."""

from __future__ import annotations

import sys
from pathlib import Path

from halfstep.certify.others import Task
from halfstep.certify.ranks import run_as_rank
from halfstep.certify.resume import begin, go_on, two_ranks

PARTS = {"ranks": run_as_rank, "begin": begin, "go-on": go_on, "two-ranks": two_ranks}

if __name__ == "__main__":
    task = Task.read(Path(sys.argv[1]))
    PARTS[task.part](task.subject, Path(task.folder))
