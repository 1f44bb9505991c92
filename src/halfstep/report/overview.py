"""A run at a glance on a terminal: its faults by gravity, then one line a measurement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from halfstep.findings.finding import Finding
from halfstep.report.html import by_severity, headline
from halfstep.report.html_figure import number
from halfstep.report.parts import AnyPart, Bars, Heat, Lines, Series

STEPS = "▁▂▃▄▅▆▇█"
WIDTH = 32
MOST_ROWS, FEWEST_COLUMNS = 4, 5
"""A table of so few rows and so many columns is told whole."""


def overview(findings: Sequence[Finding], parts: Iterable[AnyPart]) -> str:
    """Headlines of the findings, gravest first, and the run in lines."""
    told = [f"  {f.code} {f.severity.value:<7} {f.message} [{f.rule}]\n{' ' * 16}{_where(f)}" for f in by_severity(findings)]
    lines = measured(parts)
    return "\n".join([headline(by_severity(findings)), *told, *([""] if lines else []), *lines])


def measured(parts: Iterable[AnyPart]) -> list[str]:
    """One line a measurement."""
    return [line for part in parts for line in _of(part)]


def _where(finding: Finding) -> str:
    return f"{finding.path}:{finding.line}" if finding.line else "place unknown"


def _of(part: AnyPart) -> list[str]:
    if isinstance(part, Lines):
        return [_line(part, series) for series in part.series if series.points]
    if isinstance(part, Bars):
        return [f"{part.title}: " + ", ".join(f"{name} {number(amount, part.unit)}" for name, amount in part.items)]
    if isinstance(part, Heat):
        return [f"{part.title}: {len(part.rows)} layers, {len(part.columns)} updates"]
    if len(part.rows) <= MOST_ROWS and len(part.columns) >= FEWEST_COLUMNS:
        return [f"{part.title}: " + ", ".join(map(" ".join, zip(part.columns, row, strict=True))) for row in part.rows]
    return [f"{part.title}: {len(part.rows)} rows"]


def _line(part: Lines, series: Series) -> str:
    values = [y for _, y in series.points]
    name = part.title if len(part.series) == 1 else f"{part.title}, {series.name}"
    return f"{name:<24} {spark(values):<{WIDTH}} {number(values[0], part.unit)} to {number(values[-1], part.unit)}"


def spark(values: Sequence[float]) -> str:
    """A line in one row of text; `!` is a value that is not finite."""
    step = max(1, math.ceil(len(values) / WIDTH))
    shown = [_worst(values[i : i + step]) for i in range(0, len(values), step)]
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    width = (high - low) or 1.0
    return "".join(STEPS[int((v - low) / width * (len(STEPS) - 1))] if math.isfinite(v) else "!" for v in shown)


def _worst(values: Sequence[float]) -> float:
    """The last of some values; one that is not finite before all."""
    return next((value for value in values if not math.isfinite(value)), values[-1])
