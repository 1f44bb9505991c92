"""`python -m benchmarks.conformance.worker STACK FILE`: a stack's answers to every job of as many ranks as there are."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.conformance.job import Job, NotOffered, Outcome
from benchmarks.conformance.judge import Answer
from benchmarks.conformance.scenarios import SYNC_2, jobs

PATIENCE = timedelta(seconds=30)
"""How long a rank waits for one that has given up."""
Run = Callable[[Job], Outcome]


def answer(run: Run, job: Job) -> Answer:
    """What a stack answers; an error of any kind is a refusal, and so is a warning that FP16 becomes something else."""
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            outcome = _counted(run, job) if job == SYNC_2 else run(job)
        told = next((str(each.message) for each in heard if "fp16" in str(each.message)), "")
        return Answer(refused=told) if job.plain_fp16 and told else Answer(outcomes=(outcome,))
    except NotOffered as why:
        return Answer(not_offered=str(why))
    except Exception as error:  # whatever a stack raises is what its user would see
        return Answer(refused=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")


def _counted(run: Run, job: Job) -> Outcome:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        outcome = run(job)
    gradients = [[len(outcome.parameters)]]
    reduced = [event for event in profiled.events() or [] if event.name == "gloo:all_reduce"]
    outcome.gradient_reductions = sum(event.input_shapes == gradients for event in reduced)
    return outcome


def main(stack: str, file: str) -> None:
    """Run the jobs, and write what became of them, a file for each rank."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo", timeout=PATIENCE)
    run: Run = import_module(f"benchmarks.conformance.stacks.{stack}").run
    for name in ("lightning.pytorch", "lightning.fabric", "transformers", "accelerate", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    answers = []
    for job in jobs(ranks):
        began = time.perf_counter()
        answers.append(answer(run, job).to_json())
        took = time.perf_counter() - began
        if took > 5:
            print(f"{stack}: {took:.0f} s for {job}", file=sys.stderr)
    Path(f"{file}.{rank}").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # what a stack leaves behind (groups, threads, hooks at the end) must not wait for another rank
