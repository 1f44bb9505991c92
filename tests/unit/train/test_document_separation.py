"""Documents are cut, dropped or split to fit, and what that cost is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.config.options import TooLong
from halfstep.errors import DataError
from halfstep.train.documents import Documents, documents_of, fit

SMALL = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]


def contents(documents: Documents) -> list[list[int]]:
    spans = zip(documents.starts, documents.lengths, strict=True)
    return [documents.tokens[start : start + length].tolist() for start, length in spans]


def test_a_document_that_is_too_long_is_cut_dropped_or_split() -> None:
    documents = documents_of(SMALL)
    assert contents(fit(documents, 3, TooLong.CUT).documents) == [[1, 2, 3], [6, 7], [8, 9, 10]]
    assert contents(fit(documents, 3, TooLong.DROP).documents) == [[6, 7], [8, 9, 10]]
    assert contents(fit(documents, 3, TooLong.SPLIT).documents) == [[1, 2, 3], [4, 5], [6, 7], [8, 9, 10]]


def test_what_it_cost_is_said() -> None:
    assert str(fit(documents_of(SMALL), 3, TooLong.CUT)) == (
        "1 of 3 documents are longer than 3 tokens and were cut; 20.0% of 10 tokens are not used"
    )


def test_a_document_whose_answer_was_cut_off_is_left_out_and_counted() -> None:
    documents = documents_of([[1, 2, 3, 4], [5, 6]], [[False, False, False, True], [False, True]])
    fitted = fit(documents, 3, TooLong.CUT)
    assert contents(fitted.documents) == [[5, 6]]
    assert str(fitted) == (
        "1 of 2 documents are longer than 3 tokens and were cut; 1 have no token to predict and were left out; "
        "66.7% of 6 tokens are not used"
    )


def test_a_document_of_one_token_predicts_nothing() -> None:
    assert contents(fit(documents_of([[1], [2, 3]]), 4, TooLong.SPLIT).documents) == [[2, 3]]


def test_nothing_left_is_refused_in_a_sentence() -> None:
    with pytest.raises(DataError) as error:
        fit(documents_of([[1, 2, 3]]), 2, TooLong.DROP)
    assert str(error.value) == (
        "No document is left to train on: 1 of 1 documents are longer than 2 tokens and were dropped; 100.0% of 3 tokens "
        "are not used. Use a larger `data.sequence_length`, or other data."
    )


@given(st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=12), min_size=1, max_size=8), st.integers(2, 12))
def test_splitting_loses_only_single_tokens(pieces: list[list[int]], length: int) -> None:
    fitted = fit(documents_of(pieces), length, TooLong.SPLIT)
    expected = [piece[at : at + length] for piece in pieces for at in range(0, len(piece), length)]
    assert contents(fitted.documents) == [part for part in expected if len(part) > 1]
