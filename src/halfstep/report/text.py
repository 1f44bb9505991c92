"""Findings for a person: headline, place, source with a caret, why, the fix as a diff, the world."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from halfstep.findings.finding import Finding, Safety
from halfstep.imagine.edits import applied


def to_text(findings: Iterable[Finding], sources: Mapping[str, str]) -> str:
    """All findings, a blank line between."""
    return "\n\n".join(one(finding, sources.get(where(finding), "")) for finding in findings)


def where(finding: Finding) -> str:
    """What a finding's lines count in: a file, or a cell of a notebook."""
    return finding.path if finding.cell is None else f"{finding.path}:cell {finding.cell}"


def conditions(finding: Finding) -> str:
    """In which cell and which world a finding holds, as an appendix to its message."""
    parts = ([f"cell {finding.cell}"] if finding.cell is not None else []) + ([finding.world] if finding.world else [])
    return f" ({', '.join(parts)})" if parts else ""


def one(finding: Finding, source: str) -> str:
    """One finding."""
    lines = source.splitlines()
    parts = [
        f"{finding.code} {finding.severity.value}: {finding.message} [{finding.rule}]",
        f"  --> {where(finding)}:{finding.line}:{finding.column}",
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
            text = lines[number - 1]
            end = finding.end_column - 1 if finding.end_line == finding.line else len(text)
            begin = max(finding.column - 1, len(text) - len(text.lstrip()))
            before = "".join("\t" if letter == "\t" else " " for letter in text[:begin])
            shown.append(f"{' ' * width} | {before}{'^' * max(1, end - begin)}")
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
    fixes = f", {fixable} with a fix" if fixable else ""
    found = counted(count, "finding") if count else "No findings"
    return f"{found} in {counted(files, 'file')}{fixes}."


def counted(count: int, one: str, several: str = "") -> str:
    """A number with its noun."""
    return f"{count} {one if count == 1 else several or one + 's'}"
