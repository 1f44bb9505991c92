"""Findings as SARIF 2.1.0."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from halfstep import __version__
from halfstep.findings.card import Card
from halfstep.findings.finding import Finding, Severity
from halfstep.findings.registry import all_cards
from halfstep.report.text import conditions

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning"}


def to_sarif(findings: Iterable[Finding]) -> str:
    """One run with its rules and results."""
    found = list(findings)
    used = {finding.code for finding in found}
    driver = {
        "name": "halfstep",
        "version": __version__,
        "rules": [_rule(card) for card in all_cards() if card.code in used],
    }
    run = {"tool": {"driver": driver}, "results": [_result(f) for f in found], "columnKind": "unicodeCodePoints"}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _rule(card: Card) -> dict[str, object]:
    return {
        "id": card.code,
        "name": card.name,
        "shortDescription": {"text": card.what},
        "fullDescription": {"text": card.why},
        "defaultConfiguration": {"level": _LEVEL.get(card.severity, "note")},
    }


def _result(finding: Finding) -> dict[str, object]:
    region = {"startLine": finding.line, "startColumn": finding.column}
    if finding.end_line:
        region |= {"endLine": finding.end_line, "endColumn": finding.end_column}
    location = {
        "physicalLocation": {"artifactLocation": {"uri": _uri(Path(finding.path))}, "region": region},
    }
    return {
        "ruleId": finding.code,
        "level": _LEVEL.get(finding.severity, "note"),
        "message": {"text": finding.message + conditions(finding)},
        "locations": [location],
    }


def _uri(path: Path) -> str:
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())
