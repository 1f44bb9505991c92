"""Plans as a person reads them: the table of plans, the bill of the first, its time, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from halfstep.config.options import Sharding
from halfstep.plan.memory import GB, GIB, Bill, memory_bill
from halfstep.plan.model_facts import Model
from halfstep.plan.recipe import Recipe
from halfstep.plan.search import Machine, Plan, Remedy
from halfstep.plan.time import CALIBRATED_SPREAD, SPREAD, Estimate

HEAD = ("", "plan", "micro x accum.", "memory GB (GiB)", "peak in", "update", "rate", "why")


def to_text(model: Model, machine: Machine, plans: Sequence[Plan], remedies: Iterable[Remedy], *, most: int | None = None) -> str:
    """The whole answer; `most` plans of the table, all if not given."""
    shown = list(plans)[:most]
    left = len(plans) - len(shown)
    rows = [HEAD, *(_row(number, plan, model.unit) for number, plan in enumerate(shown, 1))]
    more = [f"  and {left} more: `--all` shows them"] if left else []
    best = plans[0]
    parts = [
        heading(model, machine, best),
        "\n".join([*_table(rows), *more]),
        f"Memory of plan 1 on one device, in GB (GiB), by phase:\n{bill_text(best.bill)}",
        f"Time of an update of plan 1: {_seconds(best.time.update_s)}\n{time_text(best.time)}",
    ]
    changes = [f"  {remedy.change}: {_room(remedy.plan)}" for remedy in remedies]
    if changes:
        parts.append("\n".join(["What would make it fit:", *changes]))
    return "\n\n".join(parts)


def heading(model: Model, machine: Machine, plan: Plan) -> str:
    """What is planned for what."""
    recipe, time = plan.recipe, plan.time
    length = f" of {recipe.sequence} tokens" if model.unit == "tokens" else ""
    kind = "images" if model.unit == "images" else "sequences"
    each = f"{machine.memory_bytes / GIB:.1f} GiB that torch can use"
    trains = f", {recipe.trained_of(0) / 1e6:.1f} million more of adapters trained" if recipe.adapter else ""
    return "\n".join(
        [
            f"{model.name}: {model.parameters / 1e9:.3f} billion parameters{trains}, {recipe.optimizer}",
            f"{machine.devices} x {machine.name}, {each}{' each' if machine.devices > 1 else ''} ({machine.source})",
            f"{recipe.global_batch} {kind}{length} an update; rates to {time.spread:.0%} either way, {_basis(time)}",
        ]
    )


def _basis(time: Estimate) -> str:
    if time.spread == SPREAD:
        return "as nine in ten published runs of the kind were"
    return (
        "as this machine was measured" if time.spread == CALIBRATED_SPREAD else "since no published run of the kind was compared"
    )


def bill_text(bill: Bill) -> str:
    """Every item in every phase, with the sums."""
    phases = list(bill.phases)
    rows = [("", *(str(phase) for phase in phases))]
    rows += [(name, *(_both(bill.phases[phase].get(name, 0.0)) for phase in phases)) for name in bill.items()]
    rows.append(("all tensors", *(_both(bill.phase_bytes(phase)) for phase in phases)))
    peak = f"peak in the {bill.peak_phase}: {_both(bill.allocated_bytes)} allocated"
    outside = f"+ {_both(bill.slack_bytes)} that the allocator keeps + {_both(bill.context_bytes)} of context"
    return "\n".join([*_table(rows), f"  {peak} {outside} = {_both(bill.device_bytes)}"])


def time_text(time: Estimate) -> str:
    """Each part of an update that takes a hundredth of it or more."""
    parts = [(name, seconds) for name, seconds in time.parts.items() if seconds >= 0.01 * time.update_s]
    rows = [(name, _seconds(seconds), f"{100 * seconds / time.update_s:.0f} %") for name, seconds in parts]
    return "\n".join(_table(rows))


def traced_text(traced: Mapping[str, Any], model: Model, recipe: Recipe) -> str:
    """What fake tensors counted, beside the closed form of the same on one device."""
    alone = memory_bill(model, replace(recipe, ranks=1, sharding=Sharding.NONE))
    rows = [(name, _both(size)) for name, size in traced["phases"].items()]
    depth = f", from {traced['layers'][0]} and {traced['layers'][1]} blocks" if traced["layers"] else ""
    return "\n".join(
        [
            f"Traced in {traced['seconds']:.1f} s{depth}: all tensors on one device, nothing divided, in GB (GiB)",
            *_table(rows),
            f"  the closed form says {_both(alone.allocated_bytes)} in the {alone.peak_phase}",
            f"  {traced['limits']}",
        ]
    )


def _row(number: int, plan: Plan, unit: str) -> tuple[str, ...]:
    recipe, time = plan.recipe, plan.time
    what = [str(recipe.precision), str(recipe.sharding), "checkpointed" if not recipe.checkpointing.keeps_blocks else ""]
    return (
        f"{number}. {plan.verdict}",
        " ".join(word for word in what if word not in ("", "none")),
        f"{recipe.micro_batch} x {recipe.accumulation}",
        _both(plan.bill.device_bytes),
        str(plan.bill.peak_phase),
        _seconds(time.update_s),
        f"{_short(time.rate_low)} to {_short(time.rate_high)} {unit}/s",
        plan.reason,
    )


def _room(plan: Plan) -> str:
    recipe = plan.recipe
    way = "checkpointed" if not recipe.checkpointing.keeps_blocks else "not checkpointed"
    took = f"{_both(plan.bill.device_bytes)} on a device, leaves {plan.left_bytes / GIB:.1f} GiB"
    return f"{took} ({recipe.precision}, {recipe.sharding}, {way}, micro-batch {recipe.micro_batch})"


def _both(size: float) -> str:
    return "-" if not size else f"{size / GB:.2f} ({size / GIB:.2f})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _short(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
