"""A run at a glance on a terminal: one block a measurement, what matters first, as wide as the terminal is."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median

from halfstep.report.html_figure import number
from halfstep.report.parts import ZERO, AnyPart, Bars, Heat, Lines, Mark, Series, Table

STEPS = "▁▂▃▄▅▆▇█"
MOST_STEPS, FEWEST_STEPS = 32, 8
LABEL, NARROW = 31, 72
"""Columns for the titles; on a terminal that is narrow they stand above, and what is told is indented under them."""
NUMBERS = 24
"""Columns for what is told beside a line."""
MOST_ROWS, MOST_LAYERS = 5, 3


def measured(parts: Iterable[AnyPart], width: int) -> list[str]:
    """The measurements as lines of at most `width` columns, but for words that are longer."""
    indent = 2 if width < NARROW else LABEL
    lines: list[str] = []
    marked: set[tuple[Mark, ...]] = set()
    for part in parts:
        if isinstance(part, Lines):
            once = part if part.marks not in marked else replace(part, marks=())
            marked.add(part.marks)
            part = once
        lines += [line for title, told in _of(part, width - indent) for line in _block(title, told, width, indent)]
    return lines


def _of(part: AnyPart, width: int) -> Iterator[tuple[str, Sequence[str]]]:
    if isinstance(part, Lines):
        for series in part.series:
            if series.points:
                yield part.title if len(part.series) == 1 else f"{part.title}, {series.name}", [_line(part, series, width)]
    elif isinstance(part, Bars):
        ranked = sorted(part.items, key=lambda item: (item[1] is None, -(item[1] or 0.0)))
        yield part.title, [", ".join(f"{name} {number(amount, part.unit)}" for name, amount in ranked)]
    elif isinstance(part, Heat):
        yield part.title, [_layers(part)] if part.columns else []
    else:
        yield part.title, _rows(part, width) if part.glance is None else part.glance


def _block(title: str, told: Sequence[str], width: int, indent: int) -> Iterator[str]:
    """A title with what is told beside it, or under it where there is little room; nothing where nothing is told."""
    lines = [line for text in told for line in textwrap.wrap(text, width - indent, break_long_words=False)]
    if lines and len(title) >= indent:
        yield title
    elif lines:
        yield f"{title:<{indent}}{lines.pop(0)}"
    yield from (" " * indent + line for line in lines)


def _line(part: Lines, series: Series, width: int) -> str:
    values = [y for _, y in series.points]
    bad = sum(not math.isfinite(value) for value in values)
    ends = dict.fromkeys(number(value, part.unit) for value in (values[0], values[-1]))
    told = [" to ".join(ends)]
    told += [f"{bad} of {len(values)} not finite"] if bad else []
    told += [f"{len(part.marks)} {part.marks[0].text}{'s' * (len(part.marks) > 1)}"] if part.marks else []
    room = min(MOST_STEPS, max(FEWEST_STEPS, width - NUMBERS))
    return f"{spark(values, room):<{room}} {', '.join(told)}"


def _layers(part: Heat) -> str:
    """The rows with the largest values, as they usually are, and the one with the smallest; where some were not finite."""
    known = {name: median(usual) for name, values in zip(part.rows, part.values, strict=True) if (usual := _usual(values))}
    ranked = sorted(known, key=lambda name: -known[name])
    told = [f"`{name}` {number(known[name], part.unit)}" for name in ranked[:MOST_LAYERS]]
    if len(ranked) > MOST_LAYERS:
        told.append(f"... `{ranked[-1]}` {number(known[ranked[-1]], part.unit)}")
    bad = [
        name
        for name, values in zip(part.rows, part.values, strict=True)
        if len(_usual(values)) < sum(v is not None for v in values)
    ]
    if bad:
        told.append(f"not finite at times in {len(bad)} of {len(part.rows)}, such as `{bad[0]}`")
    return ", ".join(told) or "unknown"


def _usual(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and (math.isfinite(value) or value == ZERO)]


def _rows(part: Table, width: int) -> list[str]:
    """The first rows under their columns where there is room, else word by word; how many more there are."""
    shown = part.rows[:MOST_ROWS]
    widths = [max(map(len, column)) for column in zip(part.columns, *shown, strict=True)]
    if sum(widths) + 2 * len(widths) - 2 > width:
        lines = [", ".join(f"{name} {cell}" for name, cell in zip(part.columns, row, strict=True) if cell) for row in shown]
    else:
        cells = [part.columns, *shown]
        lines = ["  ".join(f"{cell:<{room}}" for cell, room in zip(row, widths, strict=True)).rstrip() for row in cells]
    more = len(part.rows) - len(shown)
    return [*lines, f"and {more} more"] if more else lines


def spark(values: Sequence[float], width: int = MOST_STEPS) -> str:
    """A line in one row of text; `!` is a value that is not finite."""
    step = max(1, math.ceil(len(values) / width))
    shown = [_worst(values[i : i + step]) for i in range(0, len(values), step)]
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0
    return "".join(STEPS[int((v - low) / span * (len(STEPS) - 1))] if math.isfinite(v) else "!" for v in shown)


def _worst(values: Sequence[float]) -> float:
    """The last of some values; one that is not finite before all."""
    return next((value for value in values if not math.isfinite(value)), values[-1])
