import re

import pytest

from halfstep.errors import UsageError
from halfstep.findings.finding import Severity
from halfstep.findings.registry import all_cards, all_rules, family_of, find_card, find_rule


def test_severities_weigh_less_from_error_to_style() -> None:
    assert [(s.value, s.weight) for s in Severity] == [("error", 4), ("warning", 3), ("info", 2), ("perf", 1), ("style", 0)]


def test_rules_come_in_the_order_of_their_codes_and_each_has_its_card() -> None:
    codes = [rule.card.code for rule in all_rules()]
    assert codes == sorted(codes)
    assert {rule.card for rule in all_rules()} <= set(all_cards())


def test_family_is_the_folder_of_the_rule() -> None:
    assert family_of(find_card("accum-tail-dropped")) == "window"
    assert family_of(find_card("ddp-no-set-epoch")) == "ranks"


def test_a_name_that_no_rule_has_says_where_the_names_are() -> None:
    with pytest.raises(UsageError) as raised:
        find_rule("zero-grad")
    assert str(raised.value) == "there is no rule 'zero-grad'. `halfstep explain --all` lists them."


@pytest.mark.parametrize("card", all_cards(), ids=lambda card: card.name)
def test_a_card_says_what_and_why_in_whole_sentences(card: object) -> None:
    what, why, name = (str(getattr(card, key)) for key in ("what", "why", "name"))
    assert what.endswith(".")
    assert why.endswith(".")
    assert len(what) <= 100
    assert re.fullmatch(r"[a-z0-9-]+", name)
