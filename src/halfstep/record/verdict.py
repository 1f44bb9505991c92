"""The findings of a run: what the rules say of the traces of all its processes, and of the text behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from halfstep.events.trace import Decision, Story, Trace
from halfstep.events.vocabulary import Backward, Step
from halfstep.findings.finding import Finding
from halfstep.imagine.suppress import UNUSED, kept
from halfstep.record.comparing import compared, denied, ranks_table, samples_table, unexplained, unseen
from halfstep.record.probes.telling import finding
from halfstep.record.telling import Heard
from halfstep.record.text import BY_TEXT, Text
from halfstep.rules.judge import judge
from halfstep.rules.listening import windows
from halfstep.rules.measured.speed import CARDS as SPEED
from halfstep.rules.settings import Settings
from halfstep.rules.window.accum_tail_dropped import CARD as TAIL_DROPPED

_BY_COST = frozenset(card.name for card in SPEED)
"""Findings whose amounts were measured: they come with the largest first."""


@dataclass(slots=True)
class Verdict:
    """What is wrong, and with what source lines."""

    findings: list[Finding] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    heard: list[Heard] = field(default_factory=list)


def reach(heard: Sequence[Heard], settings: Settings) -> Verdict:
    """Judge what every process heard, and add what its probes found."""
    text = Text()
    for path in sorted({path for process in heard for path in process.files}):
        text.read(path)
    rules = settings.rules()
    traces = tuple(trace for process in heard for trace in _traces(process, text))
    live = [rule for rule in rules if rule.card.name not in BY_TEXT]
    found = judge(Story(traces, text.facts()), live, settings.severities())
    stepped = any(trace.has(Step) for trace in traces)
    otherwise = denied(heard)
    silent = [rule for rule in rules if rule.card.name not in otherwise | {finding.rule for finding in found}]
    found += text.findings(silent, traces, whole=not stepped) if traces else []
    measured = [f for process in heard for f in process.measured.get("findings", ())]
    measured += [*compared(heard), *unseen(heard), *_stepless(traces)]
    asked = {card.name for card in settings.cards()}
    found = _joined(found, [f for f in measured if f.rule in asked])
    return Verdict(_once(_unsuppressed(unexplained(found), text.sources)), text.sources, _ranks(heard))


def _stepless(traces: Sequence[Trace]) -> Iterator[Finding]:
    """A run in which gradients are cleared time and again, and no optimizer ever steps."""
    for trace in traces if not any(trace.has(Step) for trace in traces) else ():
        for optimizer in dict.fromkeys(o for backward in trace.of(Backward) for o in backward.optimizers):
            cleared = [window for window in windows(trace, optimizer) if window.wiped]
            count = sum(len(window.backwards) for window in cleared)
            if len(cleared) > 1 and count > len(cleared):
                message = f"`{optimizer.name}` never steps: what {count} backward passes left was cleared before it could"
                yield finding(TAIL_DROPPED, cleared[0].backwards[-1].place, message)


def _ranks(heard: Sequence[Heard]) -> list[Heard]:
    """The ranks in order, the first with tables of all; without ranks, every process."""
    ranks = sorted((h for h in heard if h.rank is not None), key=lambda h: h.rank or 0) or list(heard)
    if ranks:
        parts = [ranks_table(ranks), *ranks[0].measured.get("parts", ()), samples_table(ranks)]
        ranks[0].measured = {**ranks[0].measured, "parts": [part for part in parts if part is not None]}
    return ranks


def _traces(process: Heard, text: Text) -> list[Trace]:
    rank = (Decision("rank", process.rank, "rank", True),) if process.rank is not None and process.size > 1 else ()
    return [
        Trace(tuple(map(text.annotated, events)), rank, repeated=number > 0) for number, events in enumerate(process.stretches)
    ]


def _unsuppressed(findings: list[Finding], sources: dict[str, str]) -> list[Finding]:
    left: list[Finding] = []
    for path in dict.fromkeys(f.path for f in findings):
        mine = [replace(f, request=None) for f in findings if f.path == path]
        left += [f for f in kept(mine, sources.get(path, ""), path, frozenset()) if f.rule != UNUSED]
    return left


def _joined(found: list[Finding], measured: list[Finding]) -> list[Finding]:
    """What was heard and read, with the measurements as its evidence; what was only measured stands alone."""
    alone: list[Finding] = []
    for item in measured:
        said = next((i for i, f in enumerate(found) if f.rule == item.rule), None)
        if said is None:
            alone.append(item)
        elif item.message not in found[said].message:
            found[said] = replace(found[said], message=f"{found[said].message}; measured: {item.message}")
    return found + alone


def _once(findings: list[Finding]) -> list[Finding]:
    """One finding for each rule and line, the gravest first."""
    seen: dict[tuple[str, str, int], Finding] = {}
    for item in findings:
        seen.setdefault((item.rule, item.path, item.line), item)
    found = list(seen.values())
    return sorted(
        found,
        key=lambda f: (
            -f.severity.weight,
            *(("", found.index(f), 0) if f.rule in _BY_COST else (f.path, f.line, f.column)),
            f.code,
        ),
    )
