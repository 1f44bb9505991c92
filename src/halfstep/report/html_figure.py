"""The parts of a report as figures: shapes in SVG that stretch with the screen, words beside them in HTML that do not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape as escaped

from halfstep.report.html_page import folded, inline
from halfstep.report.parts import ZERO, AnyPart, Bars, Heat, Lines, Series, Table

WIDTH, HEIGHT = 1000.0, 300.0
NUM_COLOURS = 6
PINS_APART, AT_EDGE = 0.12, 0.05
MOST_ROWS = 40


def figure(part: AnyPart) -> str:
    """One part as a figure with its title and what to look for."""
    if isinstance(part, Lines):
        drawn = _lines(part)
    elif isinstance(part, Heat):
        drawn = _heat(part)
    elif isinstance(part, Bars):
        drawn = _bars(part)
    else:
        drawn = table(part)
    about = f"<figcaption>{escaped(part.about)}</figcaption>" if part.about else ""
    return f"<figure><h3>{escaped(part.title)}</h3>{about}{drawn}</figure>"


def table(part: Table) -> str:
    """A table that scrolls inside itself on a narrow screen; what is long is folded."""
    head = "".join(f"<th>{escaped(name)}</th>" for name in part.columns)

    def rows(some: Iterable[Sequence[str]]) -> str:
        body = "".join(f"<tr>{''.join(f'<td>{inline(cell)}</td>' for cell in row)}</tr>" for row in some)
        return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

    rest = part.rows[MOST_ROWS:]
    return rows(part.rows[:MOST_ROWS]) + (folded(f"{len(rest)} more rows", rows(rest)) if rest else "")


def number(value: float | None, unit: str = "") -> str:
    """A number for a person: three digits, and words for what is none."""
    if value is None:
        return "unknown"
    if unit == "power of ten":
        return number(10.0**value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}infinity"
    if unit == "share":
        return f"{value:.1%}"
    if unit == "s" and 0 < abs(value) < 1:
        value, unit = value * 1e3, "ms"
    size = abs(value)
    text = f"{value:.3g}" if size < 1000 else f"{value:,.0f}" if size < 1e6 else f"{value:.3g}"
    return f"{text} {unit}" if unit else text


class _Axes:
    """From values to places in the drawing."""

    def __init__(self, part: Lines) -> None:
        points = [point for series in part.series for point in series.points]
        finite = [y for _, y in points if math.isfinite(y) and (y > 0 or not part.log)]
        xs = [x for x, _ in points] or [0.0]
        self.any = bool(finite)
        self.log, self.unit = part.log, part.unit
        self.left, self.right = min(xs), max(xs)
        low, high = min(finite, default=0.0), max(finite, default=1.0)
        self.low, self.high = self._wide(self._scaled(low), self._scaled(high))
        if low >= 0 and not part.log:
            self.low = max(0.0, self.low)

    def _scaled(self, y: float) -> float:
        return math.log10(y) if self.log and y > 0 else y

    @staticmethod
    def _wide(low: float, high: float) -> tuple[float, float]:
        """With room above and below; values that are nearly one are not drawn as if they moved, and the labels differ."""
        room = max((high - low) * 0.06, abs(high) * 0.01) if high > low else abs(high) * 0.1 or 1.0
        return low - room, high + room

    def share_x(self, x: float) -> float:
        """0 at the left, 1 at the right."""
        return (x - self.left) / (self.right - self.left) if self.right > self.left else 0.5

    def share_y(self, y: float) -> float | None:
        """0 at the top, 1 at the bottom; None for what has no place on the axis."""
        if not math.isfinite(y) or (self.log and y <= 0):
            return None
        return 1 - (self._scaled(y) - self.low) / (self.high - self.low)

    def labels(self) -> list[str]:
        """The values at the top, the middle and the bottom; none where no value has a place."""
        if not self.any:
            return []
        at = [self.high, (self.high + self.low) / 2, self.low]
        return [number(10**y if self.log else y, self.unit) for y in at]


def _lines(part: Lines) -> str:
    axes = _Axes(part)
    stretches = _stretches(axes, part.series)
    bands = _bands(stretches)
    rules = "".join(f'<line class="rule" x1="0" x2="{WIDTH:g}" y1="{y:g}" y2="{y:g}"/>' for y in (0, HEIGHT / 2))
    marks = "".join(_mark(axes.share_x(mark.x), mark.text) for mark in part.marks if axes.left <= mark.x <= axes.right)
    paths = "".join(_path(axes, series, index) for index, series in enumerate(part.series))
    box = f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}" preserveAspectRatio="none" aria-hidden="true"'
    area = f"<svg {box}>{rules}{bands}{marks}{paths}</svg>"
    ys = "".join(f"<span>{escaped(label)}</span>" for label in axes.labels())
    xs = f"<span>{number(axes.left)}</span><span>{escaped(part.x)}</span><span>{number(axes.right)}</span>"
    pins = _pins(stretches)
    plot = f'<div class="y">{ys}</div><div class="area">{area}{pins}</div><div class="x">{xs}</div>'
    return f'<div class="plot">{plot}</div>{_legend(part)}'


def _mark(share: float, text: str) -> str:
    x = share * WIDTH
    return f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HEIGHT:g}"><title>{escaped(text)}</title></line>'


def _path(axes: _Axes, series: Series, index: int) -> str:
    """A line that breaks where a value has no place; a point that stands alone is a dot."""
    runs: list[list[str]] = [[]]
    for x, y in series.points:
        down = axes.share_y(y)
        if down is None:
            runs.append([])
        else:
            runs[-1].append(f"{axes.share_x(x) * WIDTH:.1f} {down * HEIGHT:.1f}")
    lines = "".join(f"M{'L'.join(run)}" for run in runs if len(run) > 1)
    dots = "".join(f"M{run[0]}h0" for run in runs if len(run) == 1)
    drawn = (("series", lines), ("series dots", dots))
    told = f"<title>{escaped(series.name)}</title>"
    return "".join(f'<path class="{kind} s{index % NUM_COLOURS}" d="{d}">{told}</path>' for kind, d in drawn if d)


def _stretches(axes: _Axes, lines: Sequence[Series]) -> list[tuple[float, float, str]]:
    """From where to where values are not finite without a break, as shares of the width, and the word for the first."""
    found = []
    for series in lines:
        begun: tuple[float, float, str] | None = None
        for x, y in series.points:
            share = axes.share_x(x)
            if math.isfinite(y):
                begun = None
            elif begun is None:
                begun = (share, share, "NaN" if math.isnan(y) else "inf")
                found.append(begun)
            else:
                begun = found[-1] = (begun[0], share, begun[2])
    return sorted(found)


def _bands(stretches: Sequence[tuple[float, float, str]]) -> str:
    return "".join(
        f'<rect class="band" x="{left * WIDTH:.1f}" y="0" width="{(right - left) * WIDTH:.1f}" height="{HEIGHT:g}"/>'
        for left, right, _ in stretches
        if right > left
    )


def _pins(stretches: Sequence[tuple[float, float, str]]) -> str:
    """The word NaN or infinity over the beginning of each stretch, as far as there is room; the legend counts all values."""
    pins, last = [], -1.0
    for left, _, word in stretches:
        if left - last >= PINS_APART:
            last = left
            edge = " left" if left < AT_EDGE else " right" if left > 1 - AT_EDGE else ""
            pins.append(f'<span class="pin{edge}" style="left:{left:.2%}">{word}</span>')
    return "".join(pins)


def _legend(part: Lines) -> str:
    """Each line by name with where it began, its extremes and where it ended; then what the red strokes are."""
    items = [f'<li><b class="s{i % NUM_COLOURS}"></b>{escaped(_told(s, part.unit))}</li>' for i, s in enumerate(part.series)]
    for text in dict.fromkeys(mark.text for mark in part.marks):
        items.append(f'<li><b class="skip"></b>{escaped(text)} ({sum(mark.text == text for mark in part.marks)})</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _told(series: Series, unit: str) -> str:
    values = [y for _, y in series.points]
    finite = [y for y in values if math.isfinite(y)]
    if len(values) == 1:
        return f"{series.name}: {number(values[0], unit)}"
    if not finite:
        return f"{series.name}: {'no finite value' if values else 'unknown'}"
    told = f"first {number(values[0], unit)}, least {number(min(finite), unit)}, most {number(max(finite), unit)}"
    bad = f", {len(values) - len(finite)} not finite" if len(finite) < len(values) else ""
    return f"{series.name}: {told}, last {number(values[-1], unit)}{bad}"


def _heat(part: Heat) -> str:
    rows = "".join(_row(part, name, values) for name, values in zip(part.rows, part.values, strict=True))
    ends = f"<span>{escaped(part.columns[0])}</span><span>{escaped(part.columns[-1])}</span>" if part.columns else ""
    axis = f'<div class="row"><span></span><div class="axis">{ends}</div></div>'
    low, high = number(part.low, part.unit), number(part.high, part.unit)
    unit = " (logarithmic)" if part.unit == "power of ten" else ""
    keys = (("red", "NaN or infinity"), ("grey", "unknown"))
    red = "".join(f'<span class="key"><span class="{colour}"></span>{text}</span>' for colour, text in keys)
    scale = f'<div class="scale">{low}<span class="ramp"></span>{high}{unit}{red}</div>'
    return f'<div class="heat">{rows}{axis}{scale}</div>'


def _row(part: Heat, name: str, values: Sequence[float | None]) -> str:
    cells = "".join(_cell(part, index, value) for index, value in enumerate(values))
    count = max(1, len(values))
    frame = f'<rect class="frame" x="0" y="0" width="{count}" height="1"/>'
    svg = f'<svg viewBox="0 0 {count} 1" preserveAspectRatio="none" role="img" aria-label="{escaped(name)}">{cells}{frame}</svg>'
    return f'<div class="row"><span class="name" title="{escaped(name)}"><bdi>{escaped(name)}</bdi></span>{svg}</div>'


def _cell(part: Heat, index: int, value: float | None) -> str:
    where = f'x="{index}" y="0" width="1" height="1"'
    told = f"<title>{escaped(part.columns[index])}: {escaped(number(value, part.unit))}</title>"
    if value is None or not (math.isfinite(value) or value == ZERO):
        return f'<rect class="{"none" if value is None else "nan"}" {where}>{told}</rect>'
    share = min(1.0, max(0.0, (value - part.low) / (part.high - part.low or 1.0)))
    return f'<rect class="cell" {where} fill-opacity="{share:.2f}">{told}</rect>'


def _bars(part: Bars) -> str:
    known = [amount for _, amount in part.items if amount is not None and math.isfinite(amount)]
    most = max(known, default=0.0) or 1.0
    return f'<div class="bars">{"".join(_bar(name, amount, most, part.unit) for name, amount in part.items)}</div>'


def _bar(name: str, amount: float | None, most: float, unit: str) -> str:
    share = max(0.0, amount / most) if amount is not None and math.isfinite(amount) else 0.0
    bar = f'<span class="bar" style="width:{share:.1%}"></span>'
    return f'<span>{escaped(name)}</span>{bar}<span class="amount">{escaped(number(amount, unit))}</span>'
