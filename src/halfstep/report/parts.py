"""What a report is made of: lines over updates, a heat map, bars, a table. Plain data, the same for every command.

A part is written as JSON beside the trace of its rank and read again where the ranks are joined; `report.html` draws it.
Numbers that are not finite stay what they are; `None` is what nobody measured and shows as "unknown".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What all parts share.

    Attributes:
        title: what is shown, in a few words.
        about: what a good and a bad picture look like, for someone who sees it for the first time.
    """

    title: str
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line: its points from left to right."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment on the horizontal axis, such as a skipped update."""

    x: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines(Part):
    """Numbers over updates.

    Attributes:
        series: the lines, which share both axes.
        marks: moments to point at.
        unit: of the vertical axis, empty for a plain number.
        log: whether the vertical axis is logarithmic.
        x: what the horizontal axis counts.
    """

    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    unit: str = ""
    log: bool = False
    x: str = "update"


ZERO = float("-inf")
"""Nothing, as a power of ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat(Part):
    """One number a row and column, as colour: `values[row][column]`, from `low` to `high`; None is unknown.

    With the unit `power of ten` these are the powers, and `ZERO` is zero.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    low: float = 0.0
    high: float = 1.0
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars(Part):
    """Amounts side by side, such as seconds a phase."""

    items: tuple[tuple[str, float | None], ...]
    unit: str = "s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Part):
    """Rows of text under named columns; numbers are already written with their unit.

    Attributes:
        glance: what a terminal says of it, in a few lines; None: the first rows.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    glance: tuple[str, ...] | None = None


AnyPart: TypeAlias = Lines | Heat | Bars | Table
_KINDS: Mapping[str, type[Lines] | type[Heat] | type[Bars] | type[Table]] = {
    "lines": Lines,
    "heat": Heat,
    "bars": Bars,
    "table": Table,
}
_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def to_dict(part: AnyPart) -> dict[str, Any]:
    """A part as data for strict JSON: numbers that are not finite become the words NaN, Infinity and -Infinity."""
    kind = next(name for name, made in _KINDS.items() if type(part) is made)
    written: dict[str, Any] = _words(asdict(part))
    return {"kind": kind, **written}


def from_dict(data: Mapping[str, Any]) -> AnyPart:
    """The part that `to_dict` wrote."""
    fields = {key: _tuples(value) for key, value in data.items() if key != "kind"}
    if "series" in fields:
        fields["series"] = tuple(Series(name=s["name"], points=_numbers(s["points"])) for s in data["series"])
        fields["marks"] = tuple(Mark(**mark) for mark in data["marks"])
    if "values" in fields:
        fields["values"] = _numbers(data["values"])
    if "items" in fields:
        fields["items"] = tuple((name, _numbers(amount)) for name, amount in data["items"])
    return _KINDS[data["kind"]](**fields)


def _words(value: Any) -> Any:
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _words(item) for key, item in value.items()}
    return [_words(item) for item in value] if isinstance(value, (list, tuple)) else value


def _numbers(value: Any) -> Any:
    if isinstance(value, str):
        return _WORDS[value]
    return tuple(_numbers(item) for item in value) if isinstance(value, list) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
