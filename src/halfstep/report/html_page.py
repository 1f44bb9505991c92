"""A page that opens offline: one file, no network, light and dark, narrow and wide. Every command that reports shares it.

A page is a title, a few facts at a glance and sections; what goes into a section is made here (text, code, chips) or by
`report.html_figure` (lines, heat maps, bars, tables). Everything that comes from outside passes through `escaped`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape as escaped
from importlib.resources import files

from halfstep import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A number at a glance: `label` under `value`."""

    label: str
    value: str
    bad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, a sentence that says what it shows, and its content, which is HTML already."""

    title: str
    content: str
    about: str = ""


def page(title: str, *, lead: str, facts: Sequence[Fact] = (), sections: Iterable[Section] = ()) -> str:
    """A whole HTML document.

    Args:
        title: what it is about, such as a command.
        lead: the answer in one sentence.
        facts: a few numbers at a glance.
        sections: in order; those without content are left out.
    """
    body = "".join(_section(section) for section in sections if section.content)
    glance = f'<dl class="facts">{"".join(_fact(fact) for fact in facts)}</dl>' if facts else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escaped(title)}</title><style>{style()}</style></head>\n'
        f'<body><header><h1>{escaped(title)}</h1><p class="lead">{inline(lead)}</p></header>{glance}\n'
        f"<main>{body}</main>\n<footer>halfstep {__version__}. This page is one file and asks nothing of the network. "
        f"A value that nobody measured is shown as unknown; NaN is shown as NaN.</footer></body></html>\n"
    )


def style() -> str:
    """The style sheet of every page."""
    return files("halfstep.report").joinpath("page.css").read_text(encoding="utf-8")


def inline(text: str) -> str:
    """Text in a line; what stands between backticks is code, and a single one is itself."""
    parts = escaped(text, quote=False).split("`")
    if len(parts) % 2 == 0:
        return "`".join(parts)
    return "".join(f"<code>{part}</code>" if odd % 2 else part for odd, part in enumerate(parts))


def paragraph(text: str) -> str:
    """A paragraph; what stands between backticks is code."""
    return f"<p>{inline(text)}</p>"


def chip(text: str, kind: str) -> str:
    """A small label, coloured by its kind: error, warning, info, perf, style, fine."""
    return f'<span class="chip {escaped(kind)}">{escaped(text)}</span>'


def code(lines: Sequence[tuple[int, str]], *, marked: int = 0) -> str:
    """Numbered source lines, one of them marked."""
    shown = "".join(
        f'<span class="line{" marked" if number == marked else ""}"><i>{number}</i>{escaped(text, quote=False) or " "}</span>'
        for number, text in lines
    )
    return f'<pre class="code">{shown}</pre>'


def folded(summary: str, content: str) -> str:
    """Content that opens on a click."""
    return f"<details><summary>{escaped(summary)}</summary>{content}</details>"


def _section(section: Section) -> str:
    about = paragraph(section.about) if section.about else ""
    return f"<section><h2>{escaped(section.title)}</h2>{about}{section.content}</section>\n"


def _fact(fact: Fact) -> str:
    bad = ' class="bad"' if fact.bad else ""
    return f"<div{bad}><dt>{escaped(fact.label)}</dt><dd>{escaped(fact.value)}</dd></div>"
