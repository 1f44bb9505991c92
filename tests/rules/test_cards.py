import ast
from pathlib import Path

import pytest

from halfstep.cli.check import check_source, fixed
from halfstep.errors import UsageError
from halfstep.findings.finding import Safety
from halfstep.findings.registry import Rule, all_cards, all_rules, find_card, find_rule
from halfstep.imagine.source import Source
from halfstep.report.page import page
from halfstep.report.pages import pages
from halfstep.rules.settings import Settings

RULES = all_rules()
SEVERE = ("error", "warning")
TAXONOMY = Path(__file__).parents[3] / "shared" / "cases" / "taxonomy.md"
NOT_IN_SOURCE = {"amp-nograd-cache"}
"""Kinds that the text of a program cannot show: it needs an old version of torch."""


def _found(text: str, rules: tuple[Rule, ...] = RULES) -> list[tuple[str, str]]:
    return [(f.rule, f.severity.value) for f in check_source(Source("example.py", text), rules, Settings())]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.card.name)
def test_example_of_a_card_fires(rule: Rule) -> None:
    assert rule.card.name in [name for name, _ in _found(rule.card.example)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.card.name)
def test_what_a_card_says_to_use_instead_is_silent(rule: Rule) -> None:
    found = _found(rule.card.instead)
    assert [name for name, severity in found if severity in SEVERE or name == rule.card.name] == []


@pytest.mark.parametrize("rule", [r for r in RULES if r.card.fix is not Safety.SHOWN], ids=lambda rule: rule.card.name)
def test_fix_makes_the_example_silent_and_is_done_once(rule: Rule) -> None:
    safety = {Safety.SAFE, Safety.UNSAFE}
    once = fixed(Source("example.py", rule.card.example), (rule,), Settings(), safety).text
    assert once != rule.card.example
    ast.parse(once)
    assert _found(once, (rule,)) == []
    assert fixed(Source("example.py", once), (rule,), Settings(), safety).text == once


@pytest.mark.parametrize("rule", [r for r in RULES if r.card.fix is not Safety.SHOWN], ids=lambda rule: rule.card.name)
def test_fixes_of_all_rules_leave_nothing_that_was_not_there(rule: Rule) -> None:
    whole = fixed(Source("example.py", rule.card.example), RULES, Settings(), {Safety.SAFE, Safety.UNSAFE}).text
    before = {name for name, _ in _found(rule.card.example)}
    assert {name for name, _ in _found(whole)} <= before - {rule.card.name}


def test_a_rule_has_a_fix_or_says_why_none() -> None:
    assert [rule.card.name for rule in RULES if (rule.card.fix is Safety.SHOWN) != bool(rule.card.unfixed)] == []


def test_page_says_how_a_fault_is_mended() -> None:
    assert page(find_card("amp-closure-scaler")).endswith(
        "## Fix\n\nBy hand. Two ways are right: BF16 without a scaler, or an optimizer without a closure.\n"
    )
    assert page(find_card("amp-scale-collapse")).endswith(
        "## Fix\n\nBy hand. What only a measurement shows has no line that an edit could change.\n"
    )


def test_codes_and_names_are_unique() -> None:
    assert len({card.code for card in all_cards()}) == len({card.name for card in all_cards()}) == len(all_cards())


def test_a_rule_is_found_by_code_and_by_name() -> None:
    assert find_rule("HS101") is find_rule("amp-clip-before-unscale")
    assert find_card("hs806") is find_card("amp-scale-collapse")


def test_what_is_only_measured_is_no_rule_of_check() -> None:
    with pytest.raises(UsageError) as raised:
        find_rule("amp-scale-collapse")
    assert str(raised.value) == "amp-scale-collapse is not heard in source: only `halfstep watch` measures it."


@pytest.mark.skipif(not TAXONOMY.exists(), reason="the taxonomy lies beside the repository only where it was written")
def test_every_kind_of_the_taxonomy_that_source_can_show_has_a_rule() -> None:
    kinds = {line.split()[1] for line in TAXONOMY.read_text().splitlines() if line.startswith("### ")}
    assert kinds - {card.name for card in all_cards()} - NOT_IN_SOURCE == set()


def test_pages_of_the_rules_are_current() -> None:
    folder = Path(__file__).parents[2] / "docs" / "rules"
    assert {path.name: path.read_text() for path in folder.glob("*.md")} == pages()
