"""`# halfstep: ignore[rule]`: findings that the author has decided to keep, and such comments that no longer do anything."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass, field

from halfstep.findings.finding import Edit, Finding, Fix, Safety, Severity

COMMENT = re.compile(r"#\s*halfstep:\s*ignore(?P<file>-file)?(?:\[(?P<rules>[^\]]*)\])?")
UNUSED = "unused-ignore"
UNUSED_CODE = "HS001"


@dataclass(slots=True)
class Suppression:
    """One comment: the line it is for, or the whole file; the rules it names, or all."""

    line: int
    column: int
    end: int
    whole_file: bool
    rules: frozenset[str]
    used: set[str] = field(default_factory=set)

    def covers(self, finding: Finding) -> bool:
        """Whether the comment speaks of a finding."""
        if (not self.whole_file and not self.line <= max(finding.end_line, finding.line)) or (
            not self.whole_file and self.line < finding.line
        ):
            return False
        return not self.rules or finding.rule in self.rules or finding.code in self.rules


def suppressions(text: str) -> list[Suppression]:
    """The comments of a source."""
    if "halfstep:" not in text:
        return []
    found: list[Suppression] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            match = COMMENT.search(token.string) if token.type == tokenize.COMMENT else None
            if match is not None:
                names = frozenset(n.strip() for n in (match["rules"] or "").split(",") if n.strip())
                line, column = token.start
                found.append(Suppression(line, column + match.start(), column + match.end(), bool(match["file"]), names))
    except (tokenize.TokenError, IndentationError, SyntaxError):
        return found
    return found


def kept(findings: Iterable[Finding], text: str, path: str, asked: frozenset[str] | None = None) -> list[Finding]:
    """The findings that no comment suppresses, and one for each comment that suppresses nothing."""
    comments = suppressions(text)
    left: list[Finding] = []
    for finding in findings:
        covering = [c for c in comments if c.covers(finding)]
        for comment in covering:
            comment.used |= {finding.rule, finding.code}
        if not covering:
            left.append(finding)
    return left + [_unused(c, path) for c in comments if _is_unused(c, asked)]


def _is_unused(comment: Suppression, asked: frozenset[str] | None) -> bool:
    if asked is not None and comment.rules and not comment.rules & asked:
        return False
    return not comment.used if not comment.rules else bool(comment.rules - comment.used)


def _unused(comment: Suppression, path: str) -> Finding:
    stale = ", ".join(sorted(comment.rules - comment.used)) or "anything"
    edit = Edit(comment.line, comment.column, comment.line, comment.end, "")
    whole = not comment.used
    return Finding(
        rule=UNUSED,
        code=UNUSED_CODE,
        severity=Severity.STYLE,
        path=path,
        line=comment.line,
        column=comment.column + 1,
        end_line=comment.line,
        end_column=comment.end + 1,
        message=f"this comment does not suppress {stale}",
        why="A comment that suppresses nothing hides the next fault of this name.",
        fix=Fix((edit,), Safety.SAFE, "delete") if whole else None,
    )
