"""Each example runs as a user would run it, and reaches what it is there to show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
pytestmark = pytest.mark.slow


def run(place: Path, name: str, *words: str, ranks: int = 0) -> str:
    """What `python examples/NAME.py WORDS` prints; under torchrun where a number of ranks is given."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *words]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert list(place.iterdir()) == [], "an example left something behind"
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    found = [float(number) for number in re.findall(pattern, text)]
    assert found, f"{pattern!r} is not in what was printed:\n{text}"
    return found


def test_every_example_is_tested() -> None:
    called = set(re.findall(r'run\(tmp_path, "(\w+)"', Path(__file__).read_text()))
    assert called == {path.stem for path in EXAMPLES.glob("*.py")}


def test_plain_loop_learns_to_sort(tmp_path: Path) -> None:
    printed = run(tmp_path, "plain_loop")
    losses = numbers(r"loss (\d+\.\d+)", printed)
    assert losses[-1] < losses[0] / 4
    assert numbers(r"held-out accuracy: ([\d.]+) of tokens", printed)[0] >= 0.85
    assert re.search(r"^precision: \w+ \(.+\)$", printed, re.M), "the reason for the precision is printed"
    assert "skipped: none" in printed


def test_plain_loop_trains_alike_on_two_ranks_and_on_one(tmp_path: Path) -> None:
    """Both see the same tokens in the same number of updates of twice the micro-batches; the order of samples differs."""
    words = ("--epochs", "1", "--sequences", "301", "--micro-batch", "8", "--precision", "fp32")
    one = run(tmp_path, "plain_loop", *words, "--accumulate", "4")
    two = run(tmp_path, "plain_loop", *words, "--accumulate", "2", ranks=2)
    tally = r"^\d+ updates of \d+ tokens"
    assert re.findall(tally, two, re.M) == re.findall(tally, one, re.M) != []


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gan_covers_the_clusters(tmp_path: Path, precision: str) -> None:
    printed = run(tmp_path, "gan", "--precision", precision)
    assert numbers(r"clusters covered: (\d+) of 8", printed)[-1] >= 6
    assert numbers(r"(\d+)% of points near one", printed)[-1] >= 50
    judged, made = re.findall(r"^(\d+) and (\d+) updates", printed, re.M)[0]
    assert int(judged) >= 1450
    assert int(made) >= 1450


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradient_penalty_holds_the_slope_and_brings_the_points_nearer(tmp_path: Path, precision: str) -> None:
    printed = run(tmp_path, "gradient_penalty", "--precision", precision)
    distances = numbers(r"distance to the real points ([\d.]+)", printed)
    assert distances[-1] < distances[0] / 2
    assert 0.5 < numbers(r"mean slope of the critic ([\d.]+)", printed)[-1] < 2


@pytest.mark.parametrize(("ranks", "workers"), [(0, 0), (0, 2), (2, 1)])
def test_iterable_data_reads_every_byte_once_an_epoch(tmp_path: Path, ranks: int, workers: int) -> None:
    printed = run(tmp_path, "iterable_data", "--workers", str(workers), "--epochs", "2", ranks=ranks)
    learned, epochs, total = map(int, re.findall(r"learned (\d+) bytes: (\d+) times the (\d+) bytes", printed)[0])
    assert learned == epochs * total > 0
    (loss, by_frequency) = map(float, re.findall(r"loss ([\d.]+) nats a byte, ([\d.]+) from", printed)[0])
    assert loss < 0.75 * by_frequency


def test_custom_launch_ends_with_equal_ranks_that_agree_with_one_process(tmp_path: Path) -> None:
    printed = run(tmp_path, "custom_launch")
    two, one = re.findall(r"rank\(s\): (\d+) updates, loss ([\d.]+) to ([\d.]+)", printed)
    assert two == one
    assert float(two[2]) < float(two[1]) / 4
    between, from_one = re.findall(r"between ranks: (\S+); from one process: (\S+)", printed)[0]
    assert float(between) == 0.0
    assert float(from_one) < 1e-5


def test_digits_held_out_are_read(tmp_path: Path) -> None:
    printed = run(tmp_path, "digits")
    assert numbers(r"held-out accuracy: ([\d.]+)", printed)[0] >= 0.97
