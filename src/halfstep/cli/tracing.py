"""`python -m halfstep.cli.tracing`: traces the job on standard input, in a process of its own, and writes what was counted.

Not a command for people: `halfstep plan --trace` starts it, since a fault in torch's tracing may end the process.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict

from halfstep.errors import HalfstepError


def main() -> int:
    """Read JSON, trace, write JSON; a fault that the user can mend is written as {"error": ...}."""
    warnings.simplefilter("ignore")
    from halfstep.measure.traced_update import TracedJob, trace

    job = TracedJob(**json.load(sys.stdin))
    try:
        print(json.dumps(asdict(trace(job))))
    except HalfstepError as error:
        print(json.dumps({"error": str(error)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
