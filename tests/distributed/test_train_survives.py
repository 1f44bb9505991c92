"""`halfstep train` on two ranks as users start it: a rank is killed or hangs, the launcher is told to end, the run is resumed."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distributed.ranks import Ended, environment
from halfstep.cli.main import main
from halfstep.config.load import load
from halfstep.distributed.failure import KEY
from halfstep.train import launch
from halfstep.train.book import Book
from halfstep.train.interruption import interruptible
from halfstep.train.job import prepare, train

TEXT = "".join(f"line {number}: the quick brown fox jumps over {number * 7 % 13} lazy dogs\n" for number in range(120))
CONFIG = """\
precision = "fp32"
data = {{files = "{folder}/text.txt", sequence_length = 16, tokenizer = "bytes"}}
batch = {{global = 2, micro = 1}}
evaluation = {{every_updates = 0, share = 0.1}}
limits = {{updates = 250}}
checkpoint = {{every_updates = 5}}
run = {{tensorboard = false}}

[model]
architecture = "llama"
config = {{hidden_size = 8, intermediate_size = 16, num_hidden_layers = 1, num_attention_heads = 2, attention_dropout = 0.1}}
"""
SECONDS = 120.0

Started = Callable[..., list[Ended]]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A text and a configuration."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "small.toml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


UPDATES = 250


def command(*words: str) -> int:
    """`halfstep WORDS` on this rank; its exit code."""
    return main(list(words))


def ranks_of(*words: str) -> list[str]:
    """What `halfstep WORDS` has each rank do that it starts."""
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "launch", lambda command, processes: told.extend(command) or 0)
        main(list(words))
    return told


def halfstep_on(*launcher: str) -> subprocess.Popen[str]:
    known = {key: value for key, value in os.environ.items() if key not in environment(0, 1, 0)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([sys.executable, "-m", *launcher], env={**known, "OMP_NUM_THREADS": "1"}, text=True, **pipes)


def wait_until(holds: Callable[[], bool], running: subprocess.Popen[str]) -> None:
    while not holds():
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.05)


def children(of: int) -> list[int]:
    return [int(pid) for pid in subprocess.run(["pgrep", "-P", str(of)], capture_output=True, text=True).stdout.split()]


def left_by(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the weights of a run."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "update"], load_file(folder / "model" / "model.safetensors")


def test_a_killed_rank_a_signal_and_a_resume_leave_what_an_uninterrupted_run_leaves(started: Started, place: Path) -> None:
    """Bitwise: torchrun starts the ranks again where one was killed, they save when it is told to end, and others go on."""
    words = ("train", str(place / "small.toml"), "--run-folder")
    run = place / "run"
    launched = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "halfstep")
    with halfstep_on(*launched, *words, str(run), "--continue") as torchrun:
        wait_until(lambda: any(run.glob("checkpoints/update-*5")), torchrun)
        os.kill(max(children(torchrun.pid)), signal.SIGKILL)
        wait_until(lambda: "resumes" in json.loads((run / "run.json").read_text()), torchrun)
        torchrun.send_signal(signal.SIGTERM)
        said, _ = torchrun.communicate(timeout=SECONDS)
    assert torchrun.returncode == 1
    record = json.loads((run / "run.json").read_text())
    assert (record["status"], [again["ranks"] for again in record["resumes"]]) == ("interrupted", [2]), said
    made = record["summary"]["applied_updates"]
    assert sorted(path.name for path in run.glob("checkpoints/update-*"))[-1] == f"update-{made:08d}"
    assert (run / "model" / "model.safetensors").exists()
    resumed = ranks_of("train", "--resume", str(run), "--processes", "2")
    assert [end.value for end in started(command, *resumed)] == [0, 0]
    assert [end.value for end in started(command, *words, str(place / "whole"))] == [0, 0]
    ours, theirs = left_by(run), left_by(place / "whole")
    assert ours[0] == theirs[0]
    assert len(ours[0]) == UPDATES
    assert all(torch.equal(weight, theirs[1][name]) for name, weight in ours[1].items())


def hangs(folder: Path) -> None:
    """A run in which rank 1 counts for ever after its third update."""
    from torch.distributed.distributed_c10d import _get_default_store

    enter = Book.enter

    def counts(book: Book, update: Any) -> None:
        enter(book, update)
        while update.index == 3 and os.environ["RANK"] == "1" and not _get_default_store().check([KEY]):
            pass

    with pytest.MonkeyPatch.context() as patch, interruptible() as interruption:
        patch.setattr(Book, "enter", counts)
        settings = [f'run.folder="{folder}/run"', "run.rank_minutes=0.05"]
        train(prepare(load(folder / "small.toml", settings), started=datetime.now()), interruption, stream=io.StringIO())


def test_a_rank_that_hangs_ends_the_run_and_is_named(started: Started, place: Path) -> None:
    first, second = started(hangs, place)
    told = r"Rank 1 did not come to meet the others in time: rank 1 is in .*/test_train_survives\.py, line \d+, in counts\."
    assert first.error == second.error == "RunStopped", first.trace
    assert re.fullmatch(told, first.message), first.message
    assert re.fullmatch(rf"Rank 0 failed, and with it the run: {told}", second.message), second.message
    record = json.loads((place / "run" / "run.json").read_text())
    assert (record["status"], record["error"]) == ("failed", first.message)
