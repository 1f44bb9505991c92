"""Writes `docs/rules/`: a page a rule and an index, from the cards. `python -m halfstep.report.pages [FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path

from halfstep.findings.card import Card
from halfstep.findings.registry import all_cards, family_of
from halfstep.report.page import page

HEAD = """# Rules

Made from the cards in the source (`python -m halfstep.report.pages`); a test holds them current.
"Kind" is the fault in the taxonomy that a rule finds: rules carry its name.

| code | rule (kind) | family | severity | fix | what |
| --- | --- | --- | --- | --- | --- |
"""


def pages() -> dict[str, str]:
    """The text of every page by file name."""
    cards = all_cards()
    made = {f"{card.name}.md": page(card) for card in cards}
    made["index.md"] = HEAD + "".join(_row(card) for card in cards)
    return made


def _row(card: Card) -> str:
    link = f"[{card.name}]({card.name}.md)"
    return f"| {card.code} | {link} | {family_of(card)} | {card.severity.value} | {card.fix.value} | {card.what} |\n"


def write(folder: Path) -> None:
    """Write all pages, and remove those of rules that are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    made = pages()
    for old in folder.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/rules"))
