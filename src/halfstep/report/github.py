"""Findings as GitHub annotations."""

from __future__ import annotations

from collections.abc import Iterable

from halfstep.findings.finding import Finding, Severity
from halfstep.report.text import conditions

_LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning"}


def to_github(findings: Iterable[Finding]) -> str:
    """One workflow command a finding."""
    return "".join(_one(finding) for finding in findings)


def _one(finding: Finding) -> str:
    level = _LEVEL.get(finding.severity, "notice")
    where = f"file={_value(finding.path)},line={finding.line},col={finding.column},title={_value(finding.rule)}"
    return f"::{level} {where}::{_text(finding.code + ' ' + finding.message + conditions(finding))}\n"


def _text(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _value(text: str) -> str:
    return _text(text).replace(":", "%3A").replace(",", "%2C")
