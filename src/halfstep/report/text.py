"""Findings for a person: headline, place, source with a caret, why, the fix as a diff, the world."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from halfstep.findings.finding import Finding, Safety
from halfstep.imagine.edits import applied


def to_text(findings: Iterable[Finding], sources: Mapping[str, str]) -> str:
    """All findings, a blank line between."""
    return "\n\n".join(one(finding, sources.get(finding.path, "")) for finding in findings)


def one(finding: Finding, source: str) -> str:
    """One finding."""
    lines = source.splitlines()
    cell = f" (cell {finding.cell})" if finding.cell is not None else ""
    parts = [
        f"{finding.code} {finding.severity.value}: {finding.message} [{finding.rule}]",
        f"  --> {finding.path}:{finding.line}:{finding.column}{cell}",
        *_excerpt(finding, lines),
    ]
    if finding.world:
        parts.append(f"  holds {finding.world}")
    if finding.why:
        parts.append(f"  why: {finding.why}")
    if finding.fix is not None:
        parts.extend(_diff(finding, source))
    return "\n".join(parts)


def _excerpt(finding: Finding, lines: list[str]) -> list[str]:
    if not 1 <= finding.line <= len(lines):
        return []
    first, last = max(1, finding.line - 1), min(len(lines), finding.line + 1)
    width = len(str(last))
    shown = [f"{' ' * width} |"]
    for number in range(first, last + 1):
        shown.append(f"{number:>{width}} | {lines[number - 1]}".rstrip())
        if number == finding.line:
            end = finding.end_column if finding.end_line == finding.line else len(lines[number - 1]) + 1
            carets = "^" * max(1, end - finding.column)
            shown.append(f"{' ' * width} | {' ' * (finding.column - 1)}{carets}")
    return shown


def _diff(finding: Finding, source: str) -> list[str]:
    fix = finding.fix
    assert fix is not None
    after = applied(source, fix.edits)
    changes = difflib.unified_diff(source.splitlines(), after.splitlines(), lineterm="", n=1)
    body = [f"    {line}" for line in list(changes)[2:]]
    how = {Safety.SAFE: "--fix applies it", Safety.UNSAFE: "--unsafe-fixes applies it: it changes the numbers"}
    return [f"  fix ({how.get(fix.safety, 'by hand')}):", *body]


def summary(count: int, files: int, fixable: int) -> str:
    """The last line."""
    noun = "finding" if count == 1 else "findings"
    where = "1 file" if files == 1 else f"{files} files"
    fixes = f", {fixable} with a fix" if fixable else ""
    return f"{count} {noun} in {where}{fixes}." if count else f"No findings in {where}."
