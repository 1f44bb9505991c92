"""Any input gets an answer."""

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import halfstep
from halfstep.cli.check import check_source
from halfstep.findings.registry import all_rules
from halfstep.imagine.source import Source, decoded, read
from halfstep.rules.settings import Settings

EXAMPLES = [rule.card.example for rule in all_rules()]
MARK = "loss.backward()\n"


def _answer(text: str) -> int:
    return len(check_source(Source("any.py", text), all_rules(), Settings()))


@given(st.binary(max_size=400))
@settings(max_examples=60, deadline=None)
def test_bytes_get_an_answer(raw: bytes) -> None:
    assert _answer(decoded(raw + MARK.encode())) >= 0


@given(st.integers(0, 10**6), st.sampled_from(range(len(EXAMPLES))))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_mutated_programs_get_an_answer(seed: int, which: int) -> None:
    rng = random.Random(seed)
    lines = EXAMPLES[which].splitlines()
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(lines))
        change = rng.choice(("drop", "double", "swap", "other"))
        if change == "drop" and len(lines) > 2:
            del lines[at]
        elif change == "double":
            lines.insert(at, lines[at])
        elif change == "swap":
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        else:
            lines[at] = rng.choice(rng.choice(EXAMPLES).splitlines())
    assert _answer("\n".join(lines)) >= 0


@pytest.mark.parametrize(
    "text",
    [
        MARK + "(" * 5000 + ")" * 5000,
        MARK + "x = " + "-" * 3000 + "1",
        MARK + "x = " + " + ".join(["a"] * 3000),
        MARK + "def f():\n    return f()\nf()",
        MARK + "class A(A): pass\nA()",
        MARK + "class A:\n    def __getattr__(self, n):\n        return getattr(self, n)\nA().x",
        MARK + "while True:\n    pass",
        MARK + "x = 10 ** 10 ** 10\ny = 'a' * 10 ** 12\nz = [0] * 10 ** 12",
        MARK + "for i in range(10 ** 12):\n    for j in range(10 ** 12):\n        loss.backward()",
        MARK + "x = []\nx.append(x)\nprint(x)\nfor y in x:\n    y.backward()",
        MARK + "type X[T] = list[T]\n",
        MARK + "x = f'{x!r:{y}}'\nmatch x:\n    case {'a': 1, **rest}:\n        pass\n    case [1, *_]:\n        pass",
        "\0" * 50 + MARK,
        "from any import *\nfrom . import any\n" + MARK,
    ],
    ids=lambda text: text[:40].replace("\n", " "),
)
def test_odd_program_gets_an_answer(text: str) -> None:
    assert _answer(decoded(text.encode())) >= 0


def test_long_file_gets_an_answer() -> None:
    assert _answer(MARK + "x = model(y)\n" * 100_000) >= 0


def test_file_without_training_code_is_not_read_further(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text("x = 1\n")
    assert read(path) is None
    assert read(path, forced=True) == Source(str(path), "x = 1\n")


def test_own_source_is_without_errors_and_warnings() -> None:
    severe = []
    for path in Path(halfstep.__file__).parent.rglob("*.py"):
        source = read(path)
        found = check_source(source, all_rules(), Settings()) if source is not None and "rules" not in path.parts else []
        severe += [(f.path, f.line, f.rule) for f in found if f.severity.value in ("error", "warning")]
    assert severe == []
