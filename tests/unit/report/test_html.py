"""The page opens offline, shows what is not a number as what it is, and says the same of every rank once."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from halfstep.findings.finding import Finding
from halfstep.findings.registry import find_card
from halfstep.report.html import Watched, headline, joined, watched_page
from halfstep.report.html_figure import figure, number
from halfstep.report.html_page import page as whole_page
from halfstep.report.parts import ZERO, AnyPart, Bars, Heat, Lines, Mark, Series, Table

NAN, INF = float("nan"), float("inf")
LOSS = Lines(
    title="Loss",
    about="It should fall.",
    series=(Series(name="loss", points=((0, 4.0), (1, NAN), (2, 2.0), (3, INF))),),
    marks=(Mark(x=1, text="skipped"),),
    log=True,
)
HEAT = Heat(title="Underflow", rows=("fc",), columns=("0", "1", "2"), values=((0.5, None, NAN),), unit="share")
BARS = Bars(title="Time", items=(("forward", 1.5), ("waiting", None)))
TABLE = Table(title="Dtypes", columns=("module", "dtype"), rows=tuple((f"blocks.{n}", "float16") for n in range(50)))
PARTS: list[AnyPart] = [LOSS, HEAT, BARS, TABLE]


def finding(rule: str, *, line: int = 2, message: str = "`fc` gives <NaN> & more") -> Finding:
    card = find_card(rule)
    told = {"rule": card.name, "code": card.code, "severity": card.severity, "why": card.why}
    return Finding(**told, path="train.py", line=line, column=1, message=message)


def page() -> str:
    findings = [finding("amp-scale-falling", line=0), finding("data-not-finite")]
    return watched_page(
        Watched(
            title="train.py --lr '<1>'",
            findings=findings,
            parts={0: PARTS},
            facts=[("updates", "4")],
            sources={"train.py": "import torch\nx = a < b\n"},
        )
    )


class Balance(HTMLParser):
    """Every tag that is opened is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_tags_are_balanced_and_what_is_the_users_is_escaped() -> None:
    text = page()
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    assert "<h1>train.py --lr &#x27;&lt;1&gt;&#x27;</h1>" in text
    assert "<code>fc</code> gives &lt;NaN&gt; &amp; more" in text
    assert "<i>2</i>x = a &lt; b" in text


def test_the_page_asks_nothing_of_the_network() -> None:
    assert re.findall(r"https?:|//[a-z]|@import|url\(|<script|<link|src=", page()) == []


def test_the_gravest_finding_comes_first_and_leads() -> None:
    text = page()
    assert text.index("A batch holds NaN or infinity.") < text.index("Updates go on being skipped")
    assert '<p class="lead">1 error, 1 warning. Look at this first: A batch holds NaN or infinity.</p>' in text
    assert "place unknown" in text


def test_a_run_without_findings_says_so() -> None:
    assert headline([]) == "No fault was seen in this run."


@pytest.mark.parametrize(
    ("value", "unit", "told"),
    [
        (None, "s", "unknown"),
        (NAN, "s", "NaN"),
        (-INF, "", "-infinity"),
        (0.1234, "share", "12.3%"),
        (65536.0, "", "65,536"),
        (0.00012345, "s", "0.123 ms"),
        (1.5e9, "", "1.5e+09"),
    ],
)
def test_numbers_are_written_for_people(value: float | None, unit: str, told: str) -> None:
    assert number(value, unit) == told


def test_values_that_are_not_finite_break_the_line_and_are_named() -> None:
    drawn = figure(LOSS)
    (dots,) = re.findall(r'<path class="series dots s0" d="([^"]*)"', drawn)
    assert dots.count("M") == 2
    assert 'class="series s0"' not in drawn
    assert re.findall(r'class="pin[^>]*>(\w+)<', drawn) == ["NaN", "inf"]
    assert "loss: first 4, least 2, most 4, last infinity, 2 not finite" in drawn
    assert "skipped (1)" in drawn


def test_a_stretch_of_nan_is_one_band_with_one_word_however_long() -> None:
    points = tuple((float(n), NAN if 20 <= n < 60 else 1.0) for n in range(100))
    drawn = figure(Lines(title="Loss", series=(Series(name="loss", points=points),)))
    assert re.findall(r'class="band" x="([\d.]+)" y="0" width="([\d.]+)"', drawn) == [("202.0", "393.9")]
    assert re.findall(r'class="pin[^>]*>(\w+)<', drawn) == ["NaN"]


def test_a_heat_map_tells_nan_from_unknown() -> None:
    drawn = figure(HEAT)
    assert drawn.count('class="cell"') == 1
    assert drawn.count('class="nan"') == 1
    assert drawn.count('class="none"') == 1
    assert "<title>0: 50.0%</title>" in drawn


def test_in_powers_of_ten_zero_is_zero_and_not_unknown() -> None:
    drawn = figure(Heat(title="Norms", rows=("fc",), columns=("0", "1"), values=((ZERO, -1.0),), low=-2.0, unit="power of ten"))
    assert 'fill-opacity="0.00"><title>0: 0</title>' in drawn
    assert "<title>1: 0.1</title>" in drawn
    assert ">0.01<" in drawn


def test_without_a_value_no_axis_is_invented() -> None:
    nowhere = Lines(title="Loss", series=(Series(name="loss", points=((0, NAN),)),))
    assert '<div class="y"></div>' in figure(nowhere)


def test_a_bar_that_nobody_measured_is_unknown() -> None:
    assert '<span class="bar" style="width:0.0%"></span><span class="amount">unknown</span>' in figure(BARS)


def test_long_tables_are_folded() -> None:
    assert "<summary>10 more rows</summary>" in figure(TABLE)


def test_ranks_share_a_picture_and_what_is_equal_is_shown_once() -> None:
    other = Heat(title="Underflow", rows=("fc",), columns=("0",), values=((1.0,),))
    made = joined({0: [LOSS, HEAT, TABLE], 1: [LOSS, other, TABLE]})
    assert [part.title for part in made] == ["Loss", "Underflow, rank 0", "Underflow, rank 1", "Dtypes"]
    second = Lines(title="Loss", series=(Series(name="loss", points=((0, 1.0),)),))
    (both,) = joined({0: [LOSS], 1: [second]})
    assert isinstance(both, Lines)
    assert [series.name for series in both.series] == ["rank 0: loss", "rank 1: loss"]


def test_what_hardly_moves_is_drawn_as_that_and_its_labels_differ() -> None:
    points = ((0, 2.481e-06), (1, 2.4801e-06), (2, 2.4805e-06))
    drawn = figure(Lines(title="Norm", series=(Series(name="norm", points=points),)))
    assert re.findall(r"<span>([^<]*)</span>", drawn)[:3] == ["2.51e-06", "2.48e-06", "2.46e-06"]
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", drawn)]
    assert max(heights) - min(heights) < 10


def test_a_line_of_one_value_has_an_axis() -> None:
    assert "<svg" in figure(Lines(title="Flat", series=(Series(name="a", points=((5, 0.0),)),)))
    assert "a: unknown" in figure(Lines(title="Empty", series=(Series(name="a", points=()),)))


BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: how the page looks is not tested here")
@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_sticks_out_of_the_page_in_a_browser(tmp_path: Path, width: int) -> None:
    probe = "<script>document.title = [document.documentElement.scrollWidth, innerWidth].join()</script>"
    (tmp_path / "page.html").write_text(page() + probe, encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},900",
    ]
    command = [str(BROWSER), *options, "--dump-dom", f"file://{tmp_path / 'page.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    needed, there = map(int, re.findall(r"<title>(\d+),(\d+)</title>", done.stdout)[0])
    assert needed <= there


def test_code_in_the_lead_is_code_and_a_title_is_left_as_the_user_wrote_it() -> None:
    html = whole_page("train.py `date`", lead="`watch` says <where>")
    assert "<h1>train.py `date`</h1>" in html
    assert '<p class="lead"><code>watch</code> says &lt;where&gt;</p>' in html
