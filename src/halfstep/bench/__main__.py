"""The door for the processes of a benchmark: a question as JSON on stdin, the answer in a file."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from halfstep.bench.describing import describe_subject
from halfstep.bench.trying import Task, attempt
from halfstep.errors import HalfstepError

if __name__ == "__main__":
    path, asked = Path(sys.argv[1]), json.load(sys.stdin)
    try:
        answer = attempt(Task(**asked)).to_dict() if "updates" in asked else asdict(describe_subject(**asked))
    except HalfstepError as error:
        answer = {"refused": str(error)}
    path.write_text(json.dumps(answer, default=str), encoding="utf-8")
