"""A foreign loop is run in several ways, and what its optimizer was given is compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from halfstep.certify.loops import Heard, _apart, _lines, certify_loop
from halfstep.cli.main import main

SCRIPT = """\
import argparse, sys
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--wrong", action="store_true")
parser.add_argument("--idle", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
x, y = torch.randn(32, 5), torch.randn(32, 1)
model = nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
if args.idle:
    sys.exit(0)
for number, (bx, by) in enumerate(zip(x.split(args.batch), y.split(args.batch)), 1):
    loss = nn.functional.mse_loss(model(bx), by)
    (loss if args.wrong else loss / args.accumulate).backward()
    if number % args.accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
NAN = float("nan")
HALVES = "--batch 4 --accumulate 2"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_ways_that_are_the_same_training_hold_and_others_do_not(script: Path) -> None:
    made = certify_loop(script, [["--batch", "8"], HALVES.split(), [*HALVES.split(), "--wrong"]])
    assert [line.holds for line in made.lines] == [True] * 4 + [True, False, False, False]
    assert made.lines[0].figure == "4 and 4"
    assert made.lines[5].figure == "1.0e+00 of its size away", "the sum of two halves is twice their mean"


def test_heard_is_what_the_step_is_given() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    heard = Heard()
    optimizer.register_step_pre_hook(heard)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    found = heard.found()
    assert found["norms"] == pytest.approx([2.0, 4.0])  # the gradient is 1 in 4 places, and nobody cleared it
    assert torch.equal(found["first"], torch.ones(4))
    assert torch.equal(found["last"], nn.utils.parameters_to_vector(model.parameters()))


def test_a_norm_that_is_not_a_number_is_not_hidden_behind_the_others() -> None:
    lines = _lines(
        "a", "b", *({"norms": norms, "first": torch.ones(1), "last": torch.ones(1)} for norms in ([1.0, 1.0], [1.0, NAN]))
    )
    assert [line.holds for line in lines] == [True, True, False, True]
    assert lines[2].figure == "nan of its size away"


def test_different_sizes_are_infinitely_apart() -> None:
    assert _apart(torch.ones(2), torch.ones(3)) == float("inf")
    assert _apart(torch.ones(2), torch.zeros(2)) == 1.0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--loop", "train.py", "--with", "--batch 8"],
            "`--loop` compares ways to split the batch: give two or more, as "
            '`--with "--batch 8 --accumulate 1" --with "--batch 4 --accumulate 2"`, in the words of the script.',
        ),
        (["--loop", "none.py", "--with", "a", "--with", "b"], "`--loop none.py`: there is no such file."),
        (["--with", "--batch 8"], "`--with` is for the arguments of a script: name it with `--loop SCRIPT`."),
        (["run.toml", "--loop", "train.py"], "`--loop` certifies a script as it is: leave out the configuration and `--set`."),
        (
            ["--loop", "train.py", "--with=--idle", "--with=--idle"],
            "`train.py --idle` made no step of a torch optimizer: there is nothing to compare.",
        ),
        (
            ["--loop", "train.py", "--with", "--bach 8", "--with", "--batch 8"],
            "`train.py --bach 8` ended with exit code 2: train.py: error: unrecognized arguments: --bach 8",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    script: Path, words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(script.parent)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["certify", *words]) == 2
    assert capsys.readouterr() == ("", f"halfstep: {sentence}\n")
