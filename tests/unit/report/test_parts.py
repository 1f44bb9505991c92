"""Parts of a report survive being written as strict JSON."""

from __future__ import annotations

import json

import pytest

from halfstep.report.parts import AnyPart, Bars, Heat, Lines, Mark, Series, Table, from_dict, to_dict

PARTS = [
    Lines(title="loss", series=(Series(name="a", points=((0.0, 1.0), (1.0, float("inf")))),), marks=(Mark(x=1, text="skip"),)),
    Heat(title="underflow", rows=("fc",), columns=("0", "1"), values=((0.5, None),), unit="share"),
    Bars(title="phases", items=(("forward", 1.5), ("step", None)), unit="s"),
    Table(title="NaN", columns=("module", "dtype"), rows=(("NaN", "fp16"),)),
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_a_part_is_the_same_after_json(part: AnyPart) -> None:
    assert from_dict(json.loads(json.dumps(to_dict(part), allow_nan=False))) == part


def test_nan_is_written_as_a_word_and_read_as_nan() -> None:
    part = Lines(title="loss", series=(Series(name="a", points=((0.0, float("nan")),)),))
    written = to_dict(part)
    assert written["series"][0]["points"] == [[0.0, "NaN"]]
    read = from_dict(json.loads(json.dumps(written)))
    assert isinstance(read, Lines)
    assert str(read.series[0].points[0][1]) == "nan"
