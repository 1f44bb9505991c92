"""The planner against published runs, other estimators and this machine: `python -m benchmarks.planner`.

The runs are `benchmarks/published_runs.tsv`, each with its source; `--runs FILE` takes another table of the same columns. The
planner knows nothing of single rows. Figures are shares: 0.04 is an error of 4 %. "on this machine" runs ten small models on the
CPU and takes minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.estimators import others
from benchmarks.harness import Goal, Row, main, ratio_row, seconds_of_process, skipped
from benchmarks.loops import engine_update
from benchmarks.models import cross_entropy, gpt
from benchmarks.planned_update import CPU, MODELS, plans_of
from benchmarks.published import TABLE, Published, published
from halfstep.config.options import Precision
from halfstep.measure.calibrating import calibrate
from halfstep.measure.clock import processor_s
from halfstep.measure.stats import summarize
from halfstep.plan.memory import memory_bill
from halfstep.plan.model_facts import from_config
from halfstep.plan.search import MARGIN
from halfstep.plan.time import SHARES, WIDTH_OF_FULL_RATE, Shares, estimate, rates_of

QUICK_MODELS, QUICK_PLANS = ("llama",), 1
GENERATIONS = ("Ampere", "Hopper", "Blackwell")
STEPS = {
    "matmul": (0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9),
    "eight_bits": (0.5, 0.55, 0.6, 0.65, 0.7),
}


def table() -> Path:
    """The table that was asked for."""
    return Path(sys.argv[sys.argv.index("--runs") + 1]) if "--runs" in sys.argv else TABLE


def runs(path: Path) -> list[Published]:
    return [row for row in published(path) if isinstance(row, Published)]


def memory(path: Path) -> Iterable[Row]:
    """Peaks of rows that tell all that memory depends on."""
    known = [row for row in runs(path) if row.complete and row.peak_bytes]
    one = [row for row in known if row.recipe.ranks * row.recipe.tensor_ranks == 1]
    many = [row for row in known if row not in one]
    yield from memory_rows("memory, one GPU", one, Goal(bound=0.04), Goal(bound=0.10))
    yield from memory_rows("memory, FSDP", many, Goal(bound=0.08), Goal(bound=0.20))
    for tells in ("allocated", "reserved"):
        told = [abs(memory_error(row)) for row in many if row.tells == tells]
        yield Row(what=f"memory, FSDP, {tells}: error", against="published", figure=summarize(told, ""))
    out = [row for row in runs(path) if row.out_of_memory]
    fitting = [str(row.number) for row in out if fits(row)]
    note = f"of {len(out)} rows that ran out of memory; rows {', '.join(fitting) or 'none'}"
    yield Row(
        what="out of memory, predicted to fit", against="published", figure=once(len(fitting)), goal=Goal(bound=0), note=note
    )


def memory_rows(what: str, rows: Sequence[Published], middle: Goal, most: Goal) -> Iterator[Row]:
    yield from errors_rows(what, rows, memory_error, middle, most)
    for name, estimator in others().items():
        errors = [abs(estimator(row.model, row.recipe) / (row.peak_bytes or 1) - 1) for row in rows]
        if errors:
            yield Row(what=f"{what}: error of {name}", against="published", figure=summarize(errors, ""))


def errors_rows(
    what: str, rows: Sequence[Published], error: Callable[[Published], float], middle: Goal, most: Goal
) -> Iterator[Row]:
    """The median and the ninth of ten errors."""
    if not rows:
        yield skipped(f"{what}: error", "published", "no such row in the table", middle)
        return
    errors = {row.number: error(row) for row in rows}
    sizes = sorted(map(abs, errors.values()))
    worst = sorted(errors.items(), key=lambda item: -abs(item[1]))[:5]
    note = "largest: " + ", ".join(f"row {number} {100 * value:+.0f} %" for number, value in worst)
    yield Row(what=f"{what}: error", against="published", figure=summarize(sizes, ""), goal=middle, note=note)
    note = f"{len(sizes)} rows"
    yield Row(what=f"{what}: nine in ten within", against="published", figure=once(ninth(sizes)), goal=most, note=note)


def ninth(sizes: Sequence[float]) -> float:
    """What nine in ten are within."""
    return sorted(sizes)[-(-9 * len(sizes) // 10) - 1]


def memory_error(row: Published) -> float:
    return predicted_bytes(row) / (row.peak_bytes or 1) - 1


def predicted_bytes(row: Published) -> float:
    bill = memory_bill(row.model, row.recipe)
    return {
        "allocated": bill.allocated_bytes,
        "reserved": bill.reserved_bytes,
        "device": bill.reserved_bytes + row.context_bytes,
    }[row.tells]


def fits(row: Published) -> bool:
    return memory_bill(row.model, row.recipe).device_bytes <= (1 - MARGIN) * row.device.visible_bytes


def rate(path: Path) -> Iterable[Row]:
    """Tokens a second of wide models on full sequences on one machine."""
    rows = timed_rows(path)
    yield from errors_rows("tokens/s", rows, lambda row: rate_error(row, SHARES), Goal(bound=0.12), Goal(bound=0.25))
    if rows:
        covered = [abs(rate_error(row, SHARES, of_truth=False)) <= spread(row) for row in rows]
        goal = Goal(bound=0.85, at_most=False)
        yield Row(what="tokens/s: within the range", against="published", figure=once(sum(covered) / len(rows)), goal=goal)
        yield from without_one_source(rows)


def timed_rows(path: Path) -> list[Published]:
    wide = [row for row in runs(path) if row.rate and row.model.hidden >= WIDTH_OF_FULL_RATE and row.recipe.nodes == 1]
    return [row for row in wide if row.timed and row.packed]


def rate_error(row: Published, shares: Mapping[str, Shares], *, of_truth: bool = True) -> float:
    rates = rates_of(row.device, row.recipe, shares.get(row.device.generation, Shares()))
    ours = estimate(row.model, row.recipe, rates).rate / (row.recipe.ranks * row.recipe.tensor_ranks)
    truth = row.rate or 1.0
    return ours / truth - 1 if of_truth else truth / ours - 1


def spread(row: Published) -> float:
    return estimate(row.model, row.recipe, rates_of(row.device, row.recipe)).spread


def without_one_source(rows: Sequence[Published]) -> Iterator[Row]:
    """The shares of the time model set anew without each source, and that source predicted with them."""
    errors: list[float] = []
    notes = []
    for source in sorted({row.source for row in rows}):
        shares = set_on([row for row in rows if row.source != source])
        left_out = [abs(rate_error(row, shares)) for row in rows if row.source == source]
        errors += left_out
        notes.append(f"{source} {median(left_out):.2f} ({len(left_out)} rows)")
    note = ", ".join(notes)
    middle, most = Goal(bound=0.12), Goal(bound=0.25)
    what = "tokens/s, its source left out"
    yield Row(what=f"{what}: error", against="published", figure=summarize(errors, ""), goal=middle, note=note)
    yield Row(what=f"{what}: nine in ten within", against="published", figure=once(ninth(errors)), goal=most)


def set_on(rows: Sequence[Published]) -> dict[str, Shares]:
    """One share at a time, twice round, to the least median and ninth-of-ten error of each generation."""
    found = dict.fromkeys(GENERATIONS, Shares())
    for generation in GENERATIONS:
        own = [row for row in rows if row.device.generation == generation]
        for name, values in (*STEPS.items(), *STEPS.items()):
            if own:
                tried = [replace(found[generation], **{name: value}) for value in values]
                found[generation] = min(tried, key=lambda shares: cost(own, generation, shares))
    return found


def cost(rows: Sequence[Published], generation: str, shares: Shares) -> float:
    sizes = sorted(abs(rate_error(row, {generation: shares})) for row in rows)
    return median(sizes) + ninth(sizes) / 2


def seconds(quick: bool) -> Iterable[Row]:
    """How long the command takes."""
    command = ["-m", "halfstep", "plan", "llama-7b", "--gpu", "A100-80GB", "--gpus", "8", "--global-batch", "256"]
    closed = [seconds_of_process(command) for _ in range(2 if quick else 5)]
    goal, traced_goal = Goal(bound=2.0), Goal(bound=20.0)
    yield Row(what="plan llama-7b", against="its goal", figure=summarize(closed, "s"), goal=goal)
    if not quick:
        traced = [seconds_of_process([*command, "--trace"]) for _ in range(3)]
        yield Row(what="plan llama-7b --trace", against="its goal", figure=summarize(traced, "s"), goal=traced_goal)


def accumulation(quick: bool) -> Iterable[Row]:
    """Tokens a second of four micro-batches an update, against one: the guide's table has it lower."""
    torch.set_num_threads(1)
    model, window = gpt(CPU, micro_batch=1)
    four = engine_update(model, window, cross_entropy)
    one = engine_update(gpt(CPU)[0], window[:1], cross_entropy)

    def four_times_one() -> None:
        for _ in window:
            one()

    seconds: dict[str, list[float]] = {"four": [], "one": []}
    order = [("four", four), ("one", four_times_one)]
    for number in range(4 if quick else 16):
        for name, work in order[:: (-1) ** number]:
            taken = processor_s(work, CPU)
            if number:  # the first makes the optimizer's states
                seconds[name].append(taken)
    what, against = "tokens/s: accumulation 4", "accumulation 1, same micro-batch"
    yield ratio_row(what, against, seconds["one"], seconds["four"], goal=Goal(bound=0.99, at_most=False))


def machine(quick: bool) -> Iterable[Row]:
    """Traced memory and calibrated time of ten small models with three plans each, on the CPU."""
    names, plans = (QUICK_MODELS, QUICK_PLANS) if quick else (tuple(MODELS), 3)
    torch.set_num_threads(1)
    precisions = (Precision.FP32,) if quick else (Precision.FP32, Precision.BF16)
    calibration = calibrate(CPU, precisions, elapsed=processor_s, budget_s=0.1 if quick else 0.5)
    counted: dict[str, float] = {}
    timed: dict[str, float] = {}
    with ThreadPoolExecutor(max_workers=2 if quick else 1) as side_by_side:
        ran = list(side_by_side.map(lambda way: updates(way, plans, names), ("memory", "time")))
    for told in ran[0]:
        counted[f"{told['model']}, {told['plan']}"] = told["traced_bytes"] / told["measured_bytes"] - 1
    for told in ran[1]:
        name, recipe = told["model"], plans_of(told["model"])[told["plan"]]
        rates = calibration.rates(recipe)
        assert rates is not None
        predicted = estimate(from_config(MODELS[name], name), recipe, rates)
        timed[f"{name}, {told['plan']}"] = predicted.update_s / median(told["seconds"]) - 1
    yield from machine_rows("traced memory", counted, 0.05)
    yield from machine_rows("time after calibration", timed, 0.20)


def updates(way: str, plans: int, names: Sequence[str]) -> list[dict[str, Any]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536" if way == "memory" else "33554432"}
    command = [sys.executable, "-m", "benchmarks.planned_update", way, str(plans), *names]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def machine_rows(what: str, errors: Mapping[str, float], bound: float) -> Iterator[Row]:
    """The largest error is what must keep the bound: the median is told beside it."""
    sizes = sorted(map(abs, errors.values()))
    note = ", ".join(f"{name} {100 * error:+.1f} %" for name, error in errors.items())
    yield Row(what=f"{what}: error", against="measured here", figure=summarize(sizes, ""), note=note)
    largest = f"{what}: largest error of {len(sizes)}"
    yield Row(what=largest, against="measured here", figure=once(max(sizes)), goal=Goal(bound=bound))


def once(value: float) -> Any:
    return summarize([value], "")


def benchmarks(path: Path) -> dict[str, Callable[[bool], Iterable[Row]]]:
    return {
        "memory": lambda quick: memory(path),
        "rate": lambda quick: rate(path),
        "seconds": seconds,
        "accumulation": accumulation,
        "machine": machine,
    }


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", benchmarks(table()), CPU, also={"--runs": "another table of published runs"}))
