"""Findings as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from halfstep.findings.finding import Finding, Fix


def to_json(findings: Iterable[Finding], more: Mapping[str, object] | None = None) -> str:
    """One object with a list of findings, and what a command has to say besides; keys are a contract."""
    return json.dumps({"findings": [as_dict(finding) for finding in findings], **(more or {})}, indent=2)


def as_dict(finding: Finding) -> dict[str, object]:
    """One finding as plain data."""
    return {
        "rule": finding.rule,
        "code": finding.code,
        "severity": finding.severity.value,
        "path": finding.path,
        "line": finding.line,
        "column": finding.column,
        "end_line": finding.end_line,
        "end_column": finding.end_column,
        "message": finding.message,
        "why": finding.why,
        "world": finding.world or None,
        "cell": finding.cell,
        "fix": _fix(finding.fix) if finding.fix else None,
    }


def _fix(fix: Fix) -> dict[str, object]:
    edits = [
        {"line": e.line, "column": e.column + 1, "end_line": e.end_line, "end_column": e.end_column + 1, "text": e.text}
        for e in fix.edits
    ]
    return {"safety": fix.safety.value, "title": fix.title, "edits": edits}
