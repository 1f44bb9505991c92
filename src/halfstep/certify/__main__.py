"""The door for the processes that a certificate starts: `python -m halfstep.certify TASK.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from halfstep.certify.loops import run_script
from halfstep.certify.others import Task
from halfstep.certify.ranks import run_as_rank
from halfstep.certify.resume import begin, go_on, two_ranks

PARTS = {"ranks": run_as_rank, "begin": begin, "go-on": go_on, "two-ranks": two_ranks}

if __name__ == "__main__":
    asked = Path(sys.argv[1])
    loop = json.loads(asked.read_text(encoding="utf-8"))
    if "script" in loop:
        run_script(loop["script"], loop["words"], Path(loop["out"]))
    else:
        task = Task.read(asked)
        PARTS[task.part](task.subject, Path(task.folder))
