"""A run at a glance on a terminal."""

from __future__ import annotations

from halfstep.findings.finding import Finding
from halfstep.findings.registry import find_card
from halfstep.report.overview import overview, spark
from halfstep.report.parts import Bars, Heat, Lines, Series, Table


def test_a_value_that_is_not_finite_is_never_thinned_out() -> None:
    values = [float(n) for n in range(1000)]
    values[500] = float("nan")
    assert spark(values).count("!") == 1
    assert len(spark(values)) == 32
    assert spark([1.0, 2.0]) == "▁█"
    assert spark([3.0]) == "▁"


def test_the_whole_text() -> None:
    card = find_card("data-not-finite")
    bad = Finding(
        rule=card.name, code=card.code, severity=card.severity, path="train.py", line=7, column=1, message="x is NaN", why=""
    )
    parts = [
        Lines(title="Loss", series=(Series(name="loss", points=((0, 4.0), (1, 2.0))),)),
        Bars(title="Time", items=(("forward", 1.5), ("waiting", None))),
        Heat(title="Norms", rows=("fc",), columns=("0",), values=((1.0,),)),
        Table(title="Dtypes", columns=("module",), rows=(("fc",),)),
    ]
    assert overview([bad], parts) == (
        "1 error. Look at this first: A batch holds NaN or infinity.\n"
        "  HS801 error   x is NaN [data-not-finite]\n"
        "                train.py:7\n"
        "\n"
        f"Loss                     {'█▁':<32} 4 to 2\n"
        "Time: forward 1.5 s, waiting unknown\n"
        "Norms: 1 layers, 1 updates\n"
        "Dtypes: 1 rows"
    )
