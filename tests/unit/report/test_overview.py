"""A run at a glance on a terminal."""

from __future__ import annotations

from halfstep.report.overview import measured, spark
from halfstep.report.parts import AnyPart, Bars, Heat, Lines, Mark, Series, Table


def test_a_value_that_is_not_finite_is_never_thinned_out() -> None:
    values = [float(n) for n in range(1000)]
    values[500] = float("nan")
    assert spark(values).count("!") == 1
    assert len(spark(values)) == 32
    assert spark([1.0, 2.0]) == "▁█"
    assert spark([3.0]) == "▁"


def rows(count: int) -> tuple[tuple[str, ...], ...]:
    return tuple((f"layer {n}", f"{n}.5%") for n in range(count))


LAYERS = tuple(f"blocks.{n}" for n in range(6))
NORMS = tuple((float(n), float("nan") if n == 2 else n + 1.0) for n in range(6))
PARTS: list[AnyPart] = [
    Lines(title="Loss", series=(Series(name="loss", points=((0, 4.0), (1, 2.0))),), marks=(Mark(x=0, text="skipped update"),)),
    Lines(
        title="Loss scale",
        series=(Series(name="scale", points=((0, 8.0), (1, float("nan")))),),
        marks=(Mark(x=0, text="skipped update"),),
    ),
    Bars(title="Time", items=(("forward", 0.5), ("waiting", None), ("backward", 1.5))),
    Heat(title="Norms", rows=LAYERS, columns=("0", "1"), values=NORMS, unit="power of ten"),
    Table(title="A title that is long enough to stand above", columns=("module", "lost"), rows=rows(7)),
    Table(title="Formats", columns=("module",), rows=(("fc",),), glance=("matrix products FP16 (3)",)),
    Table(title="What findings say already", columns=("module",), rows=(("fc",),), glance=()),
]


def test_the_whole_text() -> None:
    assert "\n".join(measured(PARTS, 100)) == (
        f"Loss                           {'█▁':<32} 4 to 2, 1 skipped update\n"
        f"Loss scale                     {'▁!':<32} 8 to NaN, 1 of 2 not finite\n"
        "Time                           backward 1.5 s, forward 500 ms, waiting unknown\n"
        "Norms                          `blocks.5` 316,228, `blocks.4` 31,623, `blocks.3` 3,162, ...\n"
        "                               `blocks.0` 3.16, not finite at times in 1 of 6, such as `blocks.2`\n"
        "A title that is long enough to stand above\n"
        "                               module   lost\n"
        "                               layer 0  0.5%\n"
        "                               layer 1  1.5%\n"
        "                               layer 2  2.5%\n"
        "                               layer 3  3.5%\n"
        "                               layer 4  4.5%\n"
        "                               and 2 more\n"
        "Formats                        matrix products FP16 (3)"
    )


def test_a_narrow_terminal_has_titles_above_and_no_line_that_is_longer() -> None:
    wide = Table(title="Ranks", columns=tuple("abcdefgh"), rows=(("0", "updates 16", "", "x" * 9, "y" * 9, "z" * 9, "v", "w"),))
    lines = measured([*PARTS, wide], 40)
    assert max(len(line) for line in lines if "title" not in line) <= 40
    assert lines[:3] == ["Loss", "  █▁             4 to 2, 1 skipped", "  update"]
    assert lines[-3:] == ["Ranks", "  a 0, b updates 16, d xxxxxxxxx, e", "  yyyyyyyyy, f zzzzzzzzz, g v, h w"]
