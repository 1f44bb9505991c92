"""Asks every rule about every world, and makes findings of what they say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from halfstep.events.trace import Decision, Story, Trace
from halfstep.findings.finding import Finding, Found, Severity
from halfstep.findings.registry import Rule


@dataclass(slots=True)
class _Heard:
    rule: Rule
    found: Found
    traces: list[Trace] = field(default_factory=list)


def judge(story: Story, rules: Iterable[Rule], severities: dict[str, Severity] | None = None) -> list[Finding]:
    """The findings of a story, in the order of their places."""
    heard: dict[tuple[str, object], _Heard] = {}
    for rule in rules:
        for trace in story.traces or (Trace(()),):
            for found in rule.check(trace, story):
                key = (rule.card.name, (found.place.path, found.place.line) if found.place else None)
                item = heard.setdefault(key, _Heard(rule, found))
                if item.traces[-1:] != [trace]:
                    item.traces.append(trace)
    findings = [_finding(item, story, severities or {}) for item in heard.values() if item.found.place is not None]
    return sorted(findings, key=lambda f: (f.path, f.line, f.column, f.code))


def _finding(item: _Heard, story: Story, severities: dict[str, Severity]) -> Finding:
    card, place = item.rule.card, item.found.place
    assert place is not None
    return Finding(
        rule=card.name,
        code=card.code,
        severity=severities.get(card.name, card.severity),
        path=place.path,
        line=place.line,
        column=place.column + 1,
        end_line=place.end_line,
        end_column=place.end_column + 1,
        message=item.found.message,
        world=_world(item, story),
        why=card.why,
        request=item.found.fix,
    )


def _world(item: _Heard, story: Story) -> str:
    """The answers without which the finding does not hold, in words."""
    root = item.traces[0].root
    others = [t for t in story.traces if t.root == root]
    if len(item.traces) >= len(others):
        return ""
    unusual = [[d for d in t.decisions if not d.usual] for t in item.traces]
    nearest = min(unusual, key=len)
    if nearest:
        return " and ".join(_words(d) for d in nearest)
    silent = [t for t in others if t not in item.traces]
    shared = set(item.traces[0].decisions).intersection(*(t.decisions for t in item.traces))
    needed = [
        d for d in item.traces[0].decisions if d in shared and d.kind != "data" and any(d not in t.decisions for t in silent)
    ]
    return " and ".join(_words(d) for d in needed[:3])


def _words(decision: Decision) -> str:
    if decision.kind == "rank":
        return f"on rank {decision.answer}"
    if decision.kind == "data":
        return f"when `{decision.key.split(': ', 1)[-1]}` is not as usual"
    if isinstance(decision.answer, bool):
        return f"when `{decision.key}` is {'true' if decision.answer else 'false'}"
    return f"when `{decision.key}` is {decision.answer!r}"
