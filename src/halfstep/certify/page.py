"""A certificate as text and as a page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape as escaped

from halfstep.certify.certificate import Certificate, Line, Topic
from halfstep.report.html_page import Fact, Section, chip, page, paragraph

KINDS = {True: "fine", False: "error", None: "info"}


def to_text(certificate: Certificate) -> str:
    """The certificate for a terminal."""
    head = [f"certificate of {certificate.subject}", f"on {certificate.machine}, in {certificate.seconds:.0f} s", ""]
    return "\n".join([*head, *_text(certificate), *(f"note: {note}" for note in certificate.notes), "", certificate.headline])


def _text(certificate: Certificate) -> Iterator[str]:
    for topic in Topic:
        about = [line_text(line) for line in certificate.lines if line.topic is topic]
        if about:
            yield from (topic.value, *about, "")


def line_text(line: Line) -> str:
    """One claim with its figure and tolerance."""
    told = [f"  {line.verdict:<9}  {line.claim}"]
    told += [f"             {text}" for text in (line.figure, line.tolerance and f"allowed {line.tolerance}", line.note) if text]
    return "\n".join(told)


def to_page(certificate: Certificate) -> str:
    """The certificate as one file of HTML that opens offline."""
    failed = sum(line.holds is False for line in certificate.lines)
    facts = [
        Fact(label="claims held", value=str(sum(line.holds is True for line in certificate.lines))),
        Fact(label="not held", value=str(failed), bad=failed > 0),
        Fact(label="not asked", value=str(sum(line.holds is None for line in certificate.lines))),
    ]
    sections = [
        Section(title=topic.value.capitalize(), content="".join(_card(line) for line in certificate.lines if line.topic is topic))
        for topic in Topic
    ]
    about = "What was done so that numbers can be compared."
    notes = Section(title="Notes", content="".join(paragraph(note) for note in certificate.notes), about=about)
    lead = f"{certificate.headline} Measured on {certificate.machine} in {certificate.seconds:.0f} s."
    return page(f"Certificate of {certificate.subject}", lead=lead, facts=facts, sections=[*sections, notes])


def _card(line: Line) -> str:
    told = [line.figure, line.tolerance and f"Allowed: {line.tolerance}", line.note]
    body = "".join(f'<p class="soft">{escaped(text)}</p>' for text in told if text)
    kind = "error" if line.holds is False else "info"
    head = f"<header>{chip(line.verdict, KINDS[line.holds])}</header>{paragraph(line.claim)}"
    return f'<article class="finding is-{kind}">{head}{body}</article>'
