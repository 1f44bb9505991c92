"""The table as text, as data and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from halfstep.bench.benching import ROUNDS, Result
from halfstep.bench.describing import Subject
from halfstep.bench.row import WAYS, size_text
from halfstep.measure.stats import Measured
from halfstep.report.html_figure import figure, table
from halfstep.report.html_page import Fact, Section, page, paragraph
from halfstep.report.parts import Bars, Table

Reasons = Mapping[str, Sequence[str]]
"""Where the time of a row goes, by its name."""
NONE: Reasons = MappingProxyType({})
COLUMNS = ("row", "rate", "against the first", "loss from the first", "memory at most", "predicted")


def to_text(subject: Subject, results: Sequence[Result], predicted: Mapping[str, int], why: Reasons = NONE) -> str:
    """The table for a terminal, with what it was measured on and what it says."""
    rows = [COLUMNS, *(_cells(subject, result, predicted) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    head = [f"{subject.parameters:,} parameters on {subject.machine}"]
    head += ["; ".join(f"{name}: {value}" for name, value in subject.conditions.items()), WAYS, ""]
    reasons = [line for row, told in why.items() for line in (f"{_heading(row)}:", *(f"  {each}" for each in told), "")]
    return "\n".join([*head, lines[0], "-" * len(lines[0]), *lines[1:], "", *_failures(results), *reasons, conclusion(results)])


def conclusion(results: Sequence[Result]) -> str:
    """What the table says, in a sentence; noise is not called a gain."""
    better = [result for result in results if result.verdict == "faster"]
    if better:
        best = max(better, key=lambda result: result.against.value if result.against else 0.0)
        return f"The fastest is {best.row}: {_ratio(best.against)} times {results[0].row}."
    if any(result.against is not None and result.against.count < ROUNDS for result in results):
        return f"Too few rounds to compare the rows: {ROUNDS} show whether a difference stays."
    if results[0].failed:
        return f"Nothing can be compared: {results[0].row} {results[0].failed}."
    return f"No row is faster than {results[0].row} beyond the spread."


def to_dict(subject: Subject, results: Sequence[Result], predicted: Mapping[str, int], why: Reasons = NONE) -> dict[str, Any]:
    """The table as plain data; rates are what counted a second, memory is in bytes."""
    rows = [
        {**asdict(result), "row": {**asdict(result.row), "name": str(result.row)}, "verdict": result.verdict}
        | {"predicted_bytes": predicted.get(str(result.row))}
        for result in results
    ]
    return {"subject": asdict(subject), "rows": rows, "why_not_faster": dict(why), "conclusion": conclusion(results)}


def to_page(subject: Subject, results: Sequence[Result], predicted: Mapping[str, int], why: Reasons = NONE) -> str:
    """The table as one file of HTML that opens offline."""
    cells = tuple(_cells(subject, result, predicted) for result in results)
    rates = Bars(
        title="Rate", about="Medians; the table has the spread.", unit=f"{subject.unit}/s", items=tuple(_bar(r) for r in results)
    )
    memory = Bars(
        title="Memory",
        about="The highest that was seen; a row that does not fit has none.",
        unit="GB",
        items=tuple((str(r.row), None if r.allocated_bytes is None else r.allocated_bytes / 1e9) for r in results),
    )
    measured = table(Table(title="Rows", columns=COLUMNS, rows=cells)) + "".join(paragraph(f) for f in _failures(results))
    reasons = [Section(title=_heading(row), content="".join(map(paragraph, told))) for row, told in why.items()]
    conditions = Table(title="Conditions", columns=("what", "how"), rows=tuple(subject.conditions.items()))
    return page(
        "halfstep bench",
        lead=conclusion(results),
        facts=[
            Fact(label="parameters", value=f"{subject.parameters:,}"),
            *[Fact(label=f"{subject.unit}/s, {r.row}", value=f"{r.rate.value:,.0f}") for r in results if r.rate is not None],
        ],
        sections=[
            Section(title="Measured", content=measured, about=f"On {subject.machine}; {WAYS}."),
            *reasons,
            Section(title="In pictures", content=figure(rates) + figure(memory)),
            Section(title="Conditions", content=table(conditions), about="Without these, no figure means anything."),
        ],
    )


def _heading(row: str) -> str:
    return f"Why {row} is not faster"


def _bar(result: Result) -> tuple[str, float | None]:
    return (str(result.row), None if result.rate is None else result.rate.value)


def _cells(subject: Subject, result: Result, predicted: Mapping[str, int]) -> tuple[str, ...]:
    guess = predicted.get(str(result.row))
    foreseen = "unknown" if guess is None else size_text(guess)
    if result.failed is not None or result.rate is None:
        kind = "does not fit" if (result.failed or "").startswith("does not fit") else "not measured"
        return (str(result.row), kind, "", "", "", foreseen)
    rate = f"{_counted(result.rate)} {subject.unit}/s"
    apart = "" if result.loss_deviation is None else f"{result.loss_deviation:.1e}"
    against = "" if result.against is None else f"{_ratio(result.against)}: {result.verdict}"
    return (str(result.row), rate, against, apart, _memory(result), foreseen)


def _counted(rate: Measured) -> str:
    once = rate.count == 1
    return f"{rate.value:,.0f} once" if once else f"{rate.value:,.0f} ({rate.low:,.0f} to {rate.high:,.0f}, {rate.count} runs)"


def _ratio(ratio: Measured | None) -> str:
    return "unknown" if ratio is None else f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def _memory(result: Result) -> str:
    if result.allocated_bytes is None:
        return "unknown"
    reserved = "" if result.reserved_bytes is None else f", reserved {size_text(result.reserved_bytes)}"
    return f"{size_text(result.allocated_bytes)}{reserved}"


def _failures(results: Sequence[Result]) -> list[str]:
    return [f"{result.row}: {result.failed}" for result in results if result.failed]
