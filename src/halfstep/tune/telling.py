"""What a search found: a table, a sentence, the reason of each value, and the configuration that `train` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from halfstep.bench.benching import Result
from halfstep.bench.describing import Subject
from halfstep.bench.row import WAYS, Row, size_text
from halfstep.config.choice import Choice
from halfstep.config.schema import Written
from halfstep.config.toml import toml_document, toml_value
from halfstep.tune.range_test import Range
from halfstep.tune.rates import Swept, lines_of
from halfstep.tune.searching import Attempt, Found, Memory, taken_bytes
from halfstep.tune.space import Space

COLUMNS = ("tried", "rate", "memory", "outcome")
AXES = {
    "precision": "precision",
    "sharding": "sharding",
    "model.checkpoint_activations": "checkpoint",
    "model.compile": "compile",
    "batch.micro": "micro",
}
"""Keys of a configuration, and what they are of a row."""


def to_text(subject: Subject, memory: Memory, found: Found, swept: Sequence[Swept] = (), range_told: str = "") -> str:
    """All that was tried, the best few over rounds, what is taken, and the learning rates."""
    head = [f"{subject.parameters:,} parameters on {subject.machine}"]
    head += ["; ".join(f"{name}: {value}" for name, value in subject.conditions.items()), WAYS, _room(memory), ""]
    trials = [(str(a.row), _rate(subject, a.result), _memory(a.result), _outcome(a, found)) for a in found.attempts]
    finals = [(str(r.row), _rate(subject, r), _memory(r), "" if r.against is None else str(r.against)) for r in found.finals]
    rates = ["", *([range_told, ""] if range_told else []), *_table(lines_of(swept))] if swept else []
    ends = [("over rounds", "rate", "memory", "of the fastest"), *finals]
    return "\n".join([*head, *_table([COLUMNS, *trials]), "", *_table(ends), *rates, "", conclusion(found)])


def conclusion(found: Found) -> str:
    """What is taken, in a sentence."""
    return f"Taken: {found.winner}, {found.because}."


def to_dict(
    subject: Subject,
    found: Found,
    choices: Mapping[str, Choice[Any]],
    swept: Sequence[Swept] = (),
    ranges: Sequence[Range] = (),
) -> dict[str, Any]:
    """The same as plain data; rates are what counted a second, memory is in bytes."""
    return {
        "subject": asdict(subject),
        "tried": [{**asdict(a.result), "name": str(a.row), "refused": a.refused} for a in found.attempts],
        "finals": [{**asdict(result), "name": str(result.row), "verdict": result.verdict} for result in found.finals],
        "winner": {**asdict(found.winner), "name": str(found.winner)},
        "conclusion": conclusion(found),
        "learning_rates": [{**asdict(each), "verdict": each.verdict(swept[0])} for each in swept],
        "range_test": [asdict(each) for each in ranges],
        "choices": {key: {"value": choice.value, "reason": choice.reason} for key, choice in choices.items()},
    }


def choices_of(found: Found, space: Space, subject: Subject) -> dict[str, Choice[Any]]:
    """The keys of a configuration that make the winner, each with its reason."""
    winner = found.winner
    size = winner.micro * winner.accumulate * winner.processes
    kept = f"every way that was tried makes this same update, here as {winner.accumulate} x {winner.micro} on each rank"
    choices = {"batch.global": Choice(value=size, reason=kept)}
    for key, axis in AXES.items():
        choices[key] = Choice(value=getattr(winner, axis), reason=space.settled.get(key) or _reason(axis, found, subject))
    if winner.processes > 1:
        return {**choices, "processes": Choice(value=winner.processes, reason="the ranks that every trial ran on")}
    del choices["sharding"]
    return choices


def config_text(written: Written, choices: Mapping[str, Choice[Any]], head: str) -> str:
    """The configuration as the user wrote it with the choices in it, each with its reason behind it."""
    table = written.model_dump(mode="json", by_alias=True, exclude_none=True)
    for key, choice in choices.items():
        section, _, name = key.rpartition(".")
        (table.setdefault(section, {}) if section else table)[name] = choice.value
    table = {key: value for key, value in table.items() if value != {}}
    return f"# {head}\n\n{toml_document(table, {key: choice.reason for key, choice in choices.items()})}"


def _reason(axis: str, found: Found, subject: Subject) -> str:
    """How the other values did, all else being equal: as near to the winner as any two ways were compared."""
    for base in _same(axis, found):
        others = [each for each in found.attempts if each.row != base and _alike(each.row, base, axis)]
        if others:
            told = [f"{_named(axis, each)}: {each.refused or _best_known(each.row, found, subject)}" for each in others]
            where = "" if base == found.winner else f"tried as {base}: "
            return f"{where}{_best_known(base, found, subject)}; {'; '.join(told)}"
    return NOT_TRIED.get(axis, "no other was tried")


def _same(axis: str, found: Found) -> list[Row]:
    """The winner, and the other ways that ran with its value."""
    rows = [each.row for each in found.attempts if not each.refused]
    return [found.winner, *(row for row in rows if getattr(row, axis) == getattr(found.winner, axis))]


def _best_known(row: Row, found: Found, subject: Subject) -> str:
    """Its rate over rounds where it was among the best few, else that of its one trial."""
    measured = [*found.finals, *(attempt.result for attempt in found.attempts)]
    return _rate(subject, next(result for result in measured if result.row == row))


NOT_TRIED = {
    "checkpoint": "recomputing buys memory with time, and memory was not short",
    "sharding": "the first that was safe: dividing more sends more",
}


def _named(axis: str, attempt: Attempt) -> str:
    return toml_value(getattr(attempt.row, axis)).strip('"')


def _alike(row: Row, base: Row, axis: str) -> bool:
    same = {axis: getattr(base, axis)} | ({"accumulate": base.accumulate} if axis == "micro" else {})
    return replace(row, **same) == base


def _outcome(attempt: Attempt, found: Found) -> str:
    if attempt.refused:
        return attempt.refused
    return "taken" if attempt.row == found.winner else ""


def _room(memory: Memory) -> str:
    if memory.limit_bytes is None:
        return "memory at hand unknown: only what ran out of it is refused"
    return f"memory at hand {size_text(memory.at_hand_bytes or 0)} for each rank, of which {memory.margin:.0%} stay free"


def _rate(subject: Subject, result: Result) -> str:
    if result.rate is None:
        return ""
    spread = f" ({result.rate.low:,.0f} to {result.rate.high:,.0f}, {result.rate.count} runs)" if result.rate.count > 1 else ""
    return f"{result.rate.value:,.0f} {subject.unit}/s{spread}"


def _memory(result: Result) -> str:
    size = taken_bytes(result)
    return ("" if result.failed else "unknown") if size is None else size_text(size)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
