"""The table: every stack's answers, judged, as text, JSON and Markdown."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.conformance.job import Job
from benchmarks.conformance.judge import Answer, Cell, judged
from benchmarks.conformance.right import right
from benchmarks.conformance.scenarios import SCENARIOS, Scenario, jobs
from benchmarks.harness import version_of

STACKS = {
    "plain": ("torch",),
    "accelerate": ("accelerate",),
    "fabric": ("lightning",),
    "lightning": ("lightning",),
    "trainer": ("transformers", "accelerate"),
    "deepspeed": ("deepspeed",),
    "halfstep": ("halfstep",),
}
TITLES = {
    "plain": "plain PyTorch",
    "accelerate": "Accelerate",
    "fabric": "Fabric",
    "lightning": "Lightning Trainer",
    "trainer": "HF Trainer",
    "deepspeed": "DeepSpeed",
    "halfstep": "halfstep",
}
"""Stacks by module, with the packages that they need."""
ALONE, PAIR = 1, 2
CORES = 2
"""Processes at a time."""
Answers = dict[Job, Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells by stack and scenario, and what they were made with."""

    cells: dict[str, dict[str, Cell]]
    versions: dict[str, str]
    seconds: float
    missing: dict[str, str]

    def count(self, stack: str, kind: str) -> int:
        """How many cells of a stack are of a kind."""
        return sum(cell.kind == kind for cell in self.cells[stack].values())

    def faults(self, stack: str) -> int:
        """How many are not right."""
        return len(self.cells[stack]) - self.count(stack, "right")


def made(*, quick: bool) -> Table:
    """Run every stack that is installed."""
    began = time.perf_counter()
    ranks = (ALONE,) if quick else (ALONE, PAIR)
    scenarios = [scenario for scenario in SCENARIOS if scenario.job.ranks in ranks]
    missing = {stack: why for stack in STACKS if (why := _missing(stack))}
    there = [stack for stack in STACKS if stack not in missing]
    answers: dict[str, Answers] = {stack: {} for stack in there}
    for count in ranks:
        with ThreadPoolExecutor(CORES // count) as at_once:
            for stack, told in zip(there, at_once.map(partial(answers_of, ranks=count), there), strict=True):
                print(f"{TITLES[stack]}: {len(told)} jobs in {count} processes", file=sys.stderr)
                answers[stack] |= told
    cells = {stack: {scenario.name: cell_of(scenario, answers[stack]) for scenario in scenarios} for stack in there}
    packages = dict.fromkeys(package for stack in cells for package in STACKS[stack])
    versions = {package: version_of(package) for package in packages}
    return Table(cells=cells, versions=versions, seconds=time.perf_counter() - began, missing=missing)


def _missing(stack: str) -> str | None:
    absent = [package for package in STACKS[stack] if find_spec(package) is None]
    return f"not installed: {absent[0]} (pip install -e '.[bench]' -c constraints.txt)" if absent else None


def cell_of(scenario: Scenario, answers: Answers) -> Cell:
    """How a stack did in a scenario."""
    job = scenario.job
    against = answers[scenario.whole] if scenario.uninterrupted else Answer(outcomes=(right(job),) * job.ranks)
    return judged(scenario.check, job, answers[job], against)


def answers_of(stack: str, ranks: int) -> Answers:
    """A stack's answers to every job of so many ranks, from processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answers"
        starter = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *starter, "-m", "benchmarks.conformance.worker", stack, str(file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"{stack} on {ranks} ranks: {done.stderr[-3000:]}")
        told = [json.loads(Path(f"{file}.{rank}").read_text()) for rank in range(ranks)]
    return of_all_ranks(ranks, [[Answer.from_json(each) for each in of_rank] for of_rank in told])


def of_all_ranks(ranks: int, told: list[list[Answer]]) -> Answers:
    """The answers by job, from the lists that the ranks gave."""
    return dict(zip(jobs(ranks), map(_joined, zip(*told, strict=True)), strict=True))


def _joined(of_ranks: Sequence[Answer]) -> Answer:
    unable = next((each for each in of_ranks if each.refused or each.not_offered), None)
    return unable or Answer(outcomes=tuple(outcome for each in of_ranks for outcome in each.outcomes))


KINDS = ("right", "wrong", "refuses", "not offered")


def as_json(table: Table) -> dict[str, Any]:
    """As JSON types."""
    return asdict(table)


def as_text(table: Table) -> str:
    """A line a scenario with a mark a stack; below, what is not right in words."""
    marks = {"right": "right", "wrong": "WRONG", "refuses": "refuses", "not offered": "-"}
    stacks = list(table.cells)
    names = list(table.cells["halfstep"])
    rows = [["scenario", *(TITLES[stack] for stack in stacks)]]
    rows += [[name, *(marks[table.cells[stack][name].kind] for stack in stacks)] for name in names]
    rows += [[kind, *(str(table.count(stack, kind)) for stack in stacks)] for kind in KINDS]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    figures = [
        f"  {TITLES[stack]}, {name}: {cell}"
        for stack in stacks
        for name, cell in table.cells[stack].items()
        if cell.kind != "right"
    ]
    made_with = ", ".join(f"{package} {version}" for package, version in table.versions.items())
    return "\n".join([*lines, "", "what is not right:", *figures, "", f"{made_with}; {table.seconds:.0f} s"])


def as_markdown(table: Table) -> str:
    """The page docs/conformance.md."""
    stacks = list(table.cells)
    made_with = ", ".join(f"{package} {version}" for package, version in table.versions.items())
    head = ["scenario", *(TITLES[stack] for stack in stacks)]
    rows = [[name, *(str(table.cells[stack][name]).replace("|", "/") for stack in stacks)] for name in table.cells["halfstep"]]
    score = [[f"**{kind}**", *(str(table.count(stack, kind)) for stack in stacks)] for kind in KINDS]
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *score, *rows]]
    links = [f"- {TITLES[stack]}: {', '.join(_links(stack))}" for stack in stacks]
    absent = [f"- {TITLES[stack]}: {why}" for stack, why in table.missing.items()]
    introduction = _INTRODUCTION.format(count=len(rows), versions=made_with, system=_system())
    return "\n".join([introduction, *lines, "", _LINKED, *links, *absent, ""])


def _links(stack: str) -> list[str]:
    return [link if "://" not in link else f"<{link}>" for link in import_module(f"benchmarks.conformance.stacks.{stack}").LINKS]


def _system() -> str:
    return f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"


_INTRODUCTION = """# Who computes what

{count} comparisons over small training jobs of known right answer, run by each stack as its documentation shows, on a CPU.
`python -m benchmarks.conformance` makes this page; each job is in `benchmarks/conformance/scenarios.py`, each stack's loop in
`benchmarks/conformance/stacks/`. Made with {versions}; {system}.

The right answer is plain PyTorch in FP64 on each window as one big batch over all ranks; of a resumed run it is the same
stack's uninterrupted run. FP16 runs on the CPU as it does on a GPU: Accelerate and HF Trainer, which have none there, are
given the autocast and the scaler that they make on a GPU; DeepSpeed's cannot be had there. "Wrong" comes with the figure,
"refuses" with the sentence. Every comparison can be made in more than one stack; all count.

What is told to halfstep's advantage: the two losses of an epoch are sums that its adapter makes of `Update.loss` and
`Update.weight`, as the loop of `halfstep train` does, where Lightning and HF Trainer report one themselves. Memory is a
number of tokens above which a forward raises the error of torch's CPU allocator, two thirds of it once the optimizer has
stepped; the search is `find_executable_batch_size`, `BatchSizeFinder`, `auto_find_batch_size`, and in halfstep the engine's
halving. The metric of the plateau is given to each rank, and averaged by whatever the stack has for that; HF Trainer's
`evaluate` is replaced by such an average.

Uneven shares are shown with `Join` in plain PyTorch, and with what every other stack does by default. Accelerate's
`join_uneven_inputs` is no answer here: its documentation says that it works with several GPUs only, and on a CPU it warns
that it has no effect (`Accelerator.multi_device` is false), so that ranks with uneven shares wait for each other for ever.

Not in the table, and why: whether BF16 is emulated, for a GPU that emulates it is needed; a run saved on two ranks and
continued on one, which `halfstep certify` asks (`docs/certify.md`), for a job here has one number of ranks. Stacks without a
loop here, tried with torch 2.13.0 on this CPU, each installed without its dependencies and then with what it imports:
Composer (mosaicml 0.32.1) requires torch<2.7.1 and torchvision<0.22.1, and `import composer` fails without torchvision;
torchtune 0.6.1 does not import with torchao 0.18.0 (`No module named 'torchao.dtypes.nf4tensor'`), and with torchao 0.9.0 it
imports, but trains by recipes over its own token models, tokenizers and checkpoints, into which these jobs do not go.
DeepSpeed 0.19.8 runs on a CPU in FP32 and under `torch_autocast`;
its `fp16` refuses there. It is installed by `pip install --no-deps --no-build-isolation deepspeed hjson ninja msgpack
py-cpuinfo einops`, with `DS_BUILD_OPS=0`; the extension that it would compile for its all-reduce on a CPU is left out.
"""
_LINKED = "The documentation that each loop follows:\n"
