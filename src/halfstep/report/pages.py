"""Writes `docs/rules/`: a page a rule and an index, from the cards. `python -m halfstep.report.pages [FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path

from halfstep.findings.registry import Rule, all_rules
from halfstep.report.page import page

HEAD = """# Rules

Made from the cards in the source (`python -m halfstep.report.pages`); a test holds them current.
"Kind" is the fault in the taxonomy that a rule finds: rules carry its name.

| code | rule (kind) | family | severity | fix | what |
| --- | --- | --- | --- | --- | --- |
"""


def pages() -> dict[str, str]:
    """The text of every page by file name."""
    rules = all_rules()
    made = {f"{rule.card.name}.md": page(rule.card) for rule in rules}
    made["index.md"] = HEAD + "".join(_row(rule) for rule in rules)
    return made


def _row(rule: Rule) -> str:
    card = rule.card
    family = rule.check.__module__.split(".")[-2]
    link = f"[{card.name}]({card.name}.md)"
    return f"| {card.code} | {link} | {family} | {card.severity.value} | {card.fix.value} | {card.what} |\n"


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
