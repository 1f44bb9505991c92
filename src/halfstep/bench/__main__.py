"""The door for the processes of a benchmark: the question lies in a folder, and each rank leaves its answer there.

Of several ranks one that fails says so and ends, so that the launcher ends those that wait for it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from halfstep.bench.benching import QUESTION
from halfstep.bench.describing import describe_subject
from halfstep.bench.trying import Task, attempt
from halfstep.distributed.env import world
from halfstep.errors import HalfstepError

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    asked = json.loads((folder / QUESTION).read_text(encoding="utf-8"))
    try:
        answer = attempt(Task(**asked)).to_dict() if "updates" in asked else asdict(describe_subject(**asked))
    except HalfstepError as error:
        answer = {"refused": str(error)}
    (folder / f"answer-{world().rank}.json").write_text(json.dumps(answer, default=str), encoding="utf-8")
    if world().size > 1 and (answer.get("failed") or "refused" in answer):
        raise SystemExit(1)
