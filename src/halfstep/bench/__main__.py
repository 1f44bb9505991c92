"""The door for the processes of a benchmark: a question as JSON on stdin, the answer as the last line of stdout."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from halfstep.bench.describing import describe_subject
from halfstep.bench.trying import Task, attempt
from halfstep.errors import HalfstepError

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    try:
        answer = attempt(Task(**asked)).to_dict() if "updates" in asked else asdict(describe_subject(**asked))
    except HalfstepError as error:
        answer = {"refused": str(error)}
    sys.stdout.write(json.dumps(answer, default=str) + "\n")
