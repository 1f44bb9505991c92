"""Training against the usual ways of doing it: `python -m benchmarks.train`.

Every row is measured here, both sides in turn in one run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from statistics import median
from typing import Any

from benchmarks.harness import Goal, Row, main, output_of_process, ratio_row
from benchmarks.loss_peak import KINDS
from halfstep._compat import accelerator_device


def large_vocabulary(quick: bool) -> Iterable[Row]:
    """A small LLaMA over a vocabulary of 32,000, 2,048 tokens a micro-batch: chunked against plain cross-entropy."""
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for _ in range(1 if quick else 5):
        for kind in KINDS:
            runs[kind].append(json.loads(output_of_process(["-m", "benchmarks.loss_peak", kind])))
    peaks = {kind: [float(run["peak_bytes"]) for run in each] for kind, each in runs.items()}
    seconds = {kind: [median(run["seconds"]) for run in each] for kind, each in runs.items()}
    against = "plain cross-entropy"
    yield ratio_row("peak memory, vocabulary 32,000", against, peaks["chunked"], peaks["plain"], goal=Goal(bound=0.7), unit="B")
    yield ratio_row("update, vocabulary 32,000", against, seconds["chunked"], seconds["plain"])


BENCHMARKS = {"vocabulary": large_vocabulary}

if __name__ == "__main__":
    sys.exit(main("Training against the usual ways of doing it.", BENCHMARKS, accelerator_device()))
