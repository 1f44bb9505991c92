from halfstep.events.vocabulary import Place
from halfstep.findings.finding import Edit, FixRequest, Safety
from halfstep.imagine.edits import Editor, applied
from halfstep.imagine.fixing.actions import fix_of


def test_edits_are_applied_at_their_places_whatever_their_order() -> None:
    edits = [Edit(2, 0, 2, 1, "B"), Edit(1, 0, 1, 1, "A")]
    assert applied("a\nb\n", edits) == "A\nB\n"


def test_of_two_edits_that_overlap_the_first_place_wins() -> None:
    assert applied("abcd", [Edit(1, 1, 1, 3, "X"), Edit(1, 2, 1, 4, "Y")]) == "aXd"


def test_columns_of_places_count_bytes_and_those_of_edits_characters() -> None:
    source = 'name = "é"; f(1)'
    start = source.encode().index(b"f(1)")
    fix = fix_of(Editor(source), FixRequest("keyword", Place("p", 1, start, 1, start + 4), "b=2"), Safety.SAFE)
    assert fix is not None
    assert applied(source, fix.edits) == 'name = "é"; f(1, b=2)'


def test_statement_that_shares_its_line_is_not_deleted() -> None:
    place = Place("p", 1, 6, 1, 14)
    assert fix_of(Editor("f(); o.step()"), FixRequest("delete", place), Safety.SAFE) is None


def test_keyword_is_added_or_replaced() -> None:
    for before, after in (("f(a)", "f(a, b=1)"), ("f(b=2, c=3)", "f(b=1, c=3)"), ("f()", "f(b=1)")):
        fix = fix_of(Editor(before), FixRequest("keyword", Place("p", 1, 0, 1, len(before)), "b=1"), Safety.SAFE)
        assert fix is not None
        assert applied(before, fix.edits) == after
