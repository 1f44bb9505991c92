"""The report of a watched run: what is wrong first, then the run in pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape as escaped

from halfstep.findings.finding import Finding, Severity
from halfstep.findings.registry import find_card
from halfstep.report.html_figure import figure
from halfstep.report.html_page import Fact, Section, chip, code, folded, inline, page, paragraph
from halfstep.report.parts import AnyPart, Lines

CONTEXT_LINES = 3
COUNTED = {
    Severity.PERF: ("way to save time", "ways to save time"),
    Severity.INFO: ("note", "notes"),
    Severity.STYLE: ("remark on style", "remarks on style"),
}
"""What one finding of a severity is called where they are counted, and several; the others go by their own name."""
WORDS = paragraph(
    "An update is one step of the optimizer. Forward computes the loss, backward its gradient, which says how each weight should "
    "change; the norm is its length. A rank is one of several processes that train one model together."
) + paragraph(
    "FP32, FP16 and BF16 are number formats of 32, 16 and 16 bits. FP16 reaches from 0.00006, below which it loses digits, to "
    "65,504; BF16 reaches as far as FP32, with fewer digits. The loss scale is a factor that lifts gradients into FP16's range: "
    "an update whose gradients overflow is skipped, and the factor halved. NaN is the result of what has none, such as 0 / 0."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """All that the report of one run is made of.

    Attributes:
        title: the command that was watched.
        findings: what is wrong, of all ranks.
        parts: what each rank measured, by rank.
        facts: a few numbers at a glance, with their label; they come after the counts of findings.
        sources: the text of the files that findings point into, by path.
    """

    title: str
    findings: Sequence[Finding]
    parts: Mapping[int, Sequence[AnyPart]]
    facts: Sequence[tuple[str, str]] = ()
    sources: Mapping[str, str] = field(default_factory=dict)


def watched_page(run: Watched) -> str:
    """The page of a watched run: one file that opens offline."""
    ranked = by_severity(run.findings)
    severe = sum(f.severity in (Severity.ERROR, Severity.WARNING) for f in ranked)
    facts = [Fact(label="errors and warnings", value=str(severe), bad=severe > 0)]
    facts += [Fact(label=label, value=value) for label, value in run.facts]
    found = "".join(finding_card(finding, run.sources) for finding in ranked) or paragraph("Nothing was found wrong.")
    pictures = "".join(figure(part) for part in joined(run.parts))
    sections = [
        Section(title="What was found", content=found),
        Section(title="The run in pictures", content=pictures, about="Each says what a good and a bad one look like."),
        Section(title="Words", content=folded("What the words on this page mean", WORDS)),
    ]
    return page(run.title, lead=headline(ranked), facts=facts, sections=sections)


def headline(findings: Sequence[Finding]) -> str:
    """The answer in one sentence."""
    if not findings:
        return "No fault was seen in this run."
    counts = Counter(finding.severity for finding in findings)
    names = {s: COUNTED.get(s, (s.value, f"{s.value}s")) for s in Severity}
    words = [f"{counts[s]} {names[s][counts[s] > 1]}" for s in Severity if counts[s]]
    first = find_card(findings[0].rule).what
    return f"{', '.join(words)}. Look at this first: {first}"


def by_severity(findings: Sequence[Finding]) -> list[Finding]:
    """The gravest first; as they were found among equals."""
    return sorted(findings, key=lambda finding: -finding.severity.weight)


def finding_card(finding: Finding, sources: Mapping[str, str]) -> str:
    """One finding: what it is, what was seen, where, why it matters and what to write instead."""
    card = find_card(finding.rule)
    known = finding.line > 0
    where = f"{finding.path}:{finding.line}" if known else "place unknown"
    head = f"{chip(finding.severity.value, finding.severity.value)}<h3>{inline(card.what)}</h3>"
    return (
        f'<article class="finding is-{finding.severity.value}"><header>{head}</header>{paragraph(_sentence(finding.message))}'
        f'<p class="soft">{escaped(where)} · {escaped(finding.rule)} ({escaped(finding.code)})</p>'
        f"{_excerpt(finding, sources.get(finding.path, ''))}{paragraph(finding.why or card.why)}"
        f"{folded('What to write instead', code(list(enumerate(card.instead.rstrip().splitlines(), 1))))}</article>"
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "`")) else ".")


def _excerpt(finding: Finding, source: str) -> str:
    lines = source.splitlines()
    if not 1 <= finding.line <= len(lines):
        return ""
    first, last = max(1, finding.line - CONTEXT_LINES), min(len(lines), finding.line + CONTEXT_LINES)
    return code([(n, lines[n - 1]) for n in range(first, last + 1)], marked=finding.line)


def joined(parts: Mapping[int, Sequence[AnyPart]]) -> list[AnyPart]:
    """The parts of all ranks: lines of one title in one picture, what is the same on all ranks once, the rest rank by rank."""
    if len(parts) == 1:
        return list(next(iter(parts.values())))
    titles = dict.fromkeys(part.title for of_rank in parts.values() for part in of_rank)
    return [made for title in titles for made in _of_title(title, parts)]


def _of_title(title: str, parts: Mapping[int, Sequence[AnyPart]]) -> list[AnyPart]:
    found = [(rank, part) for rank, of_rank in sorted(parts.items()) for part in of_rank if part.title == title]
    first = found[0][1]
    if all(part == first for _, part in found):
        return [first]
    if isinstance(first, Lines):
        lines = [(rank, part) for rank, part in found if isinstance(part, Lines)]
        series = tuple(replace(s, name=f"rank {rank}: {s.name}") for rank, part in lines for s in part.series)
        return [replace(first, series=series)]
    return [replace(part, title=f"{title}, rank {rank}") for rank, part in found]
