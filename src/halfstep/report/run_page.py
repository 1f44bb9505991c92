"""The page of one run, or of several side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape as escaped
from typing import Any

from halfstep.report.html_figure import figure, number, table
from halfstep.report.html_page import Fact, Section, page
from halfstep.report.parts import Lines, Mark, Series, Table
from halfstep.report.runs import RunRecord

MOST_POINTS = 800
"""Points of one line: more than a screen is wide says nothing more."""

_CONTRACT = {
    "fp32": ("FP32 (TF32 in matmuls where the GPU has it)", "FP32", "FP32", "FP32"),
    "fp16": ("FP16 under autocast, loss scaled", "FP32", "FP32", "FP32"),
    "bf16": ("BF16 under autocast", "FP32", "FP32", "FP32"),
    "bf16-pure": ("BF16", "BF16", "BF16", "none: BF16 parameters are updated as they are"),
}
"""Of each precision: what forward and backward compute in, what gradients are added in, what ranks reduce, the master weights."""


def run_page(runs: Sequence[RunRecord]) -> str:
    """The page: the numbers at a glance, the curves, the numeric contract and every choice with its reason."""
    single = runs[0] if len(runs) == 1 else None
    curves = "".join(figure(part) for part in _curves(runs) if any(series.points for series in part.series))
    sections = [
        Section(title="Side by side", content="" if single else table(_comparison(runs))),
        Section(
            title="Curves", content=curves, about="Red strokes are skipped updates; a line breaks where a value is not finite."
        ),
        Section(
            title="Numeric contract", content=table(_contract(runs)), about="What each number of a run is held and added in."
        ),
        Section(title="Skipped updates", content=_skips(runs)),
        Section(
            title="Every choice with its reason",
            content="".join(_choices(run, titled=single is None) for run in runs),
            about="As the run's own files have it; `asked for` is what the user wrote.",
        ),
    ]
    title = f"Run {single.name}" if single else f"{len(runs)} runs"
    return page(title, lead=_lead(runs), facts=_facts(single) if single else (), sections=sections)


def _lead(runs: Sequence[RunRecord]) -> str:
    if len(runs) > 1:
        judged = [(loss, run.name) for run in runs if (loss := _held_out(run, "best")) is not None and math.isfinite(loss)]
        best = f" The lowest held-out loss is {min(judged)[0]:.4g}, of {min(judged)[1]}." if judged else ""
        return f"{', '.join(f'{run.name} ({_ending(run)})' for run in runs)}.{best}"
    (run,) = runs
    error = f": {run.record['error']}" if run.record.get("error") else ""
    because = f": {run.summary['because']}" if run.summary.get("because") else error
    return f"{_ending(run).capitalize()}{because}."


def _ending(run: RunRecord) -> str:
    return str(run.record.get("status", "unknown"))


def _facts(run: RunRecord) -> list[Fact]:
    skipped = sum(run.summary.get("skipped", {}).values()) if run.summary else sum(u["cause"] is not None for u in run.updates)
    return [
        Fact(label="updates applied", value=_applied(run)),
        Fact(label="updates skipped", value=str(skipped), bad=skipped > 0),
        Fact(label="held-out loss, best", value=number(_held_out(run, "best"))),
        Fact(label=f"{run.unit}/s, median{_spread(run)}", value=_rate(run)),
        Fact(label="memory at most", value=_memory(run)),
        Fact(label="wall time", value=number(run.summary.get("wall_s"), "s")),
    ]


def _comparison(runs: Sequence[RunRecord]) -> Table:
    rows: dict[str, Callable[[RunRecord], str]] = {
        "ended": _ending,
        "precision": lambda run: str(run.config.get("precision", "unknown")),
        "processes": lambda run: str(run.config.get("processes", "unknown")),
        "global batch": lambda run: str(run.config.get("batch", {}).get("global", "unknown")),
        "applied": _applied,
        "training loss, last": lambda run: number(run.updates[-1]["loss"]) if run.updates else "unknown",
        "held-out loss, last": lambda run: number(_held_out(run, "final")),
        "held-out loss, best": lambda run: number(_held_out(run, "best")),
        "rate": lambda run: f"{_rate(run)} {run.unit}/s{_spread(run)}",
        "memory": _memory,
        "wall time": lambda run: number(run.summary.get("wall_s"), "s"),
    }
    told = tuple((name, *(tell(run) for run in runs)) for name, tell in rows.items())
    return Table(title="Runs", columns=("", *(run.name for run in runs)), rows=told)


def _applied(run: RunRecord) -> str:
    applied = run.updates[-1]["applied"] if run.updates else 0
    planned = run.record.get("planned_updates")
    return f"{applied} of {planned}" if planned else str(applied)


def _held_out(run: RunRecord, which: str) -> float | None:
    looked = run.summary.get(which)
    if looked:
        return float(looked["loss"]) if looked["loss"] is not None else math.nan
    losses = [math.nan if e["loss"] is None else float(e["loss"]) for e in run.evaluations]
    if not losses:
        return None
    return losses[-1] if which == "final" else min(losses, key=lambda loss: (math.isnan(loss), loss))


def _rate(run: RunRecord) -> str:
    rate = run.summary.get("rate")
    return f"{rate['median']:,.0f}" if rate else "unknown"


def _spread(run: RunRecord) -> str:
    rate = run.summary.get("rate")
    return f" ({rate['low']:,.0f} to {rate['high']:,.0f} in {rate['updates']} updates)" if rate else ""


def _memory(run: RunRecord) -> str:
    held = run.summary.get("peak_memory_bytes")
    return "unknown" if held is None else f"{held / 1e9:.2f} GB"


def _curves(runs: Sequence[RunRecord]) -> Iterator[Lines]:
    several = len(runs) > 1

    def named(run: RunRecord, what: str) -> str:
        return f"{run.name}, {what}" if several else what

    def of_updates(key: str, what: str) -> tuple[Series, ...]:
        return tuple(Series(name=named(run, what), points=_points(run.updates, key)) for run in runs)

    held_out = tuple(
        Series(name=named(run, "held-out"), points=tuple((e["update"], _float(e["loss"])) for e in run.evaluations))
        for run in runs
    )
    marks = () if several else tuple(Mark(x=u["index"], text="skipped update") for u in runs[0].updates if u["cause"] is not None)
    yield Lines(
        title="Loss",
        about="It should fall, and held-out loss with it; where the two part, the model learns its data by heart.",
        series=(*of_updates("loss", "training"), *held_out),
        marks=marks,
    )
    yield Lines(
        title="Gradient norm",
        about="Of the true gradient, before clipping. A steady level is good; a rise before a rise of the loss is a warning.",
        series=of_updates("grad_norm", "norm"),
        marks=marks,
        log=True,
    )
    if any(u["scale"] != 1.0 for run in runs for u in run.updates):
        about = "Doubles now and then and halves at an overflow. One that only falls means values out of FP16's range."
        yield Lines(title="Loss scale", about=about, series=of_updates("scale", "scale"), marks=marks, log=True)
    yield Lines(title="Learning rate", about="As the scheduler moved it.", series=of_updates("lr", "rate"))
    yield Lines(
        title="Throughput",
        about="What counted, over wall time. Level is good; a fall means that something else takes the time.",
        series=of_updates("tokens_per_s", "rate"),
        unit=f"{runs[0].unit}/s",
    )
    yield Lines(
        title="Memory",
        about="The highest use so far. It should stand still after the first updates.",
        series=tuple(
            Series(name=named(run, "memory"), points=_scaled(_points(run.updates, "memory_bytes"), 1e-9)) for run in runs
        ),
        unit="GB",
    )


def _points(updates: Sequence[Mapping[str, Any]], key: str) -> tuple[tuple[float, float], ...]:
    """Evenly thinned where there are very many; what is not finite always stays."""
    known = [(float(u["index"]), float(u[key])) for u in updates if u.get(key) is not None]
    step = max(1, math.ceil(len(known) / MOST_POINTS))
    last = len(known) - 1
    return tuple(p for i, p in enumerate(known) if i % step == 0 or i == last or not math.isfinite(p[1]))


def _scaled(points: tuple[tuple[float, float], ...], factor: float) -> tuple[tuple[float, float], ...]:
    return tuple((x, y * factor) for x, y in points)


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)


def _contract(runs: Sequence[RunRecord]) -> Table:
    columns = ("run", "parameters", "forward and backward", "accumulated in", "reduced over ranks in", "master weights")
    return Table(title="Numeric contract", columns=columns, rows=tuple(_contract_row(run) for run in runs))


def _contract_row(run: RunRecord) -> tuple[str, ...]:
    precision = str(run.config.get("precision"))
    if precision not in _CONTRACT:
        return (run.name, *["unknown"] * 5)
    compute, accumulated, reduced, master = _CONTRACT[precision]
    held = "BF16" if precision == "bf16-pure" else "FP32"
    alone = run.config.get("processes", 1) == 1
    own = "the parameters themselves" if master == "FP32" else master
    return (run.name, held, compute, accumulated, "one process: nothing to reduce" if alone else reduced, own)


def _skips(runs: Sequence[RunRecord]) -> str:
    rows = tuple(
        (run.name, str(u["index"]), str(u["cause"]), str(u.get("detail") or ""), number(u["loss"]), number(u["scale"]))
        for run in runs
        for u in run.updates
        if u["cause"] is not None
    )
    if not rows:
        return ""
    return table(
        Table(title="Skipped updates", columns=("run", "update", "cause", "where", "loss", "scale"), rows=rows[:MOST_POINTS])
    )


def _choices(run: RunRecord, *, titled: bool) -> str:
    choices = {**run.record.get("choices", {}), **{f"engine.{k}": v for k, v in (run.record.get("engine") or {}).items()}}
    if not choices:
        return ""
    rows = tuple((name, str(choice["value"]), str(choice["reason"])) for name, choice in choices.items())
    head = f"<h3>{escaped(run.name)}</h3>" if titled else ""
    return head + table(Table(title="Choices", columns=("what", "value", "reason"), rows=rows))
