"""`halfstep train --resume`: the run that was ended goes on as if it had not been; what would change it is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from train_command import Train, command, environment

from halfstep.train.saving import Saver

SETTINGS = (
    "limits.updates=9",
    "evaluation.every_updates=2",
    "checkpoint.every_updates=2",
    "optimizer.ema_decay=0.5",
    "model.config.attention_dropout=0.1",
    "run.tensorboard=false",
)
KEPT = ("model/model.safetensors", "best/model.safetensors", "ledger.jsonl")


class Killed(BaseException):
    """The process is gone: nothing below catches this."""


Interrupt = Callable[..., Path]


@pytest.fixture
def cut_off(train: Train, place: Path, monkeypatch: pytest.MonkeyPatch) -> Interrupt:
    """A run that dies right after a save, as a kill would leave it."""

    def run(*words: str, after: int) -> Path:
        config = None if "--resume" in words else "tiny.toml"
        save = Saver.save

        def saves_and_dies(saver: Saver) -> None:
            save(saver)
            if saver.book.updates == after:
                saver.checkpoints.wait()
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(Saver, "save", saves_and_dies)
            with pytest.raises(Killed):
                train(*words, config=config)
        return place / "run"

    return run


def said_of(folder: Path) -> dict[str, Any]:
    """What a run's folder says, without the times."""
    timed = ("seconds", "elapsed_s", "tokens_per_s", "memory_bytes")
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    log = [{key: value for key, value in line.items() if key not in timed} for line in lines]
    files = {name: (folder / name).read_bytes() for name in KEPT if (folder / name).exists()}
    return {"log": log, **files}


def summary_of(folder: Path) -> dict[str, Any]:
    summary = dict(json.loads((folder / "run.json").read_text())["summary"])
    return {key: value for key, value in summary.items() if key not in ("wall_s", "rate", "peak_memory_bytes")}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_that_was_killed_goes_on_bitwise(precision: str, train: Train, cut_off: Interrupt, place: Path) -> None:
    words = (f"precision={precision}",)
    assert train(*SETTINGS, *words).code == 0
    (place / "run").rename(place / "whole")
    run = cut_off(*SETTINGS, *words, after=2)
    ledger = (run / "ledger.jsonl").read_text()
    (run / "ledger.jsonl").write_text(ledger + '{"index": 3, "applied": true, "lo')  # a line that was being written
    (run / "best.partial").mkdir()
    said = train("--resume", "run", config=None)
    assert said.code == 0, said.err
    assert said_of(run) == said_of(place / "whole")
    ours, theirs = summary_of(run), summary_of(place / "whole")
    looks = [{k: v for k, v in (end["best"] or {}).items() if k != "seconds"} for end in (ours, theirs)]
    assert looks[0] == looks[1]
    assert ours["applied_updates"] == theirs["applied_updates"] == 9
    assert ours["tokens"] == theirs["tokens"]
    record = json.loads((run / "run.json").read_text())
    assert (record["status"], len(record["resumes"]), record["resumes"][0]["ranks"]) == ("finished", 1, 1)


def test_after_two_resumes_in_a_row(train: Train, cut_off: Interrupt, place: Path) -> None:
    assert train(*SETTINGS).code == 0
    (place / "run").rename(place / "whole")
    cut_off(*SETTINGS, after=2)
    run = cut_off("--resume", "run", after=6)
    assert train("--resume", "run", config=None).code == 0
    assert said_of(run) == said_of(place / "whole")


def test_a_run_that_was_never_saved_begins_again_in_its_folder(train: Train, place: Path) -> None:
    words = ("limits.updates=3", "run.tensorboard=false")
    assert train(*words).code == 0
    shutil.copytree(place / "run", place / "whole")
    record = json.loads((place / "run" / "run.json").read_text())
    (place / "run" / "run.json").write_text(json.dumps({**record, "status": "running"}))
    assert train("--resume", "run", config=None).code == 0
    assert said_of(place / "run") == said_of(place / "whole")


def test_another_micro_batch_sees_the_same_samples(train: Train, cut_off: Interrupt, place: Path) -> None:
    assert train(*SETTINGS, "model.config.attention_dropout=0.0").code == 0
    (place / "run").rename(place / "whole")
    run = cut_off(*SETTINGS, "model.config.attention_dropout=0.0", after=4)
    assert train("--resume", "run", "batch.micro=4", config=None).code == 0
    ours, theirs = ([line["loss"] for line in said_of(folder)["log"]] for folder in (run, place / "whole"))
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_continue_begins_a_run_and_then_goes_on_with_it(train: Train, cut_off: Interrupt, place: Path) -> None:
    run = cut_off(*SETTINGS, "--continue", after=2)
    assert train(*SETTINGS, "--continue").code == 0
    record = json.loads((run / "run.json").read_text())
    assert (record["status"], record["summary"]["applied_updates"], len(record["resumes"])) == ("finished", 9, 1)


def refused(said: Any, *sentences: str) -> None:
    assert (said.code, said.out) == (2, "")
    assert said.err.splitlines()[-1] == f"halfstep: {' '.join(sentences)}"


def test_what_would_change_the_numbers_is_refused(train: Train, cut_off: Interrupt) -> None:
    cut_off(*SETTINGS, after=2)
    can = (
        "`processes`, `batch.micro`, `data.workers`, `limits.minutes`, `evaluation.keep_best`, `checkpoint.every_updates`, "
        "`checkpoint.every_minutes`, `checkpoint.keep`, `run.tensorboard`, `run.loggers`, "
        "`run.rank_minutes`."
    )
    for key in ("precision=bf16", "batch.global=4", "optimizer.learning_rate=1.0"):
        refused(
            train("--resume", "run", key, config=None),
            f"`{key.partition('=')[0]}` cannot be changed while a run goes on: it keeps its configuration, and with it its",
            "numbers.",
            f"These can be changed: {can}",
        )


def test_a_damaged_checkpoint_is_refused_and_the_one_before_used_when_asked_for(train: Train, cut_off: Interrupt) -> None:
    run = cut_off(*SETTINGS, after=4)
    os.truncate(run / "checkpoints" / "update-00000004" / "rank-00000.safetensors", 99)
    said = train("--resume", "run", config=None)
    assert said.code == 2
    assert said.err.splitlines()[-1].endswith(
        "The one before it, after update 2, is whole: ask for it (`update=2`, or `--from 2`)."
    )
    assert train("--resume", "run", "--from", "2", config=None).code == 0


def test_other_data_are_refused(train: Train, cut_off: Interrupt, place: Path) -> None:
    cut_off(*SETTINGS, after=2)
    text = (place / "text.txt").read_text()
    (place / "text.txt").write_text(text.replace("fox", "cat"))
    refused(
        train("--resume", "run", config=None),
        "run/checkpoints/update-00000002 was trained on other samples than the data hold now, though as many.",
        "A run goes on with the data that it began with.",
    )
    (place / "text.txt").write_text(text * 2)
    said = train("--resume", "run", config=None)
    assert said.code == 2
    assert " samples of " in said.err.splitlines()[-1]


def test_what_cannot_go_on(train: Train, place: Path) -> None:
    refused(
        train("--resume", "nowhere", config=None),
        "`--resume nowhere`: it holds no run (run.json and config.toml). Give the folder of a run.",
    )
    refused(
        train("--resume", "run"),
        "`--resume RUN` goes on with the run's own configuration, in its own folder: leave the others out.",
    )
    refused(train("--from", "3"), "`--from UPDATE` says where a run goes on: give `--resume RUN` too.")
    (place / "tiny.toml").write_text((place / "tiny.toml").read_text().replace('[run]\nfolder = "run"\n', ""))
    refused(
        train("--continue"),
        "`--continue` needs to know the run's folder: give `--run-folder DIR`, or `run.folder`.",
    )
    assert train("limits.updates=1", "run.folder=done").code == 0
    refused(
        train("--resume", "done", config=None),
        "`--resume done`: the run has finished. To train its model further, begin a run with `model.path=done/model`.",
    )


def test_sigterm_saves_and_ends_in_time_and_the_run_goes_on_bitwise(train: Train, place: Path) -> None:
    words = ("limits.updates=150", "run.tensorboard=false", "evaluation.every_updates=0")
    process = subprocess.Popen(command(*words), env=environment(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("update"):
            process.send_signal(signal.SIGTERM)
            break
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    run = place / "run"
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    made = len((run / "ledger.jsonl").read_text().splitlines())
    assert [path.name for path in run.glob("checkpoints/update-*")] == [f"update-{made:08d}"]
    assert made < 150
    assert train("--resume", "run", config=None).code == 0
    run.rename(place / "resumed")
    assert train(*words).code == 0
    assert said_of(place / "resumed") == said_of(run)


def test_a_checkpoint_is_exported_for_from_pretrained(train: Train, place: Path) -> None:
    from safetensors.torch import load_file

    for decay in ("0.0", "0.5"):
        assert train("checkpoint.every_updates=2", "run.folder=r" + decay, f"optimizer.ema_decay={decay}").code == 0
        to = place / f"exported{decay}"
        said = train("--export", f"r{decay}", str(to), config=None)
        assert (said.code, said.out) == (0, f"{to} holds the model of r{decay}/checkpoints/update-00000006\n"), said.err
        exported, kept = load_file(to / "model.safetensors"), load_file(place / f"r{decay}" / "model" / "model.safetensors")
        assert exported.keys() == kept.keys()
        assert all(torch.equal(exported[name], kept[name]) for name in kept)
    assert train("--export", "r0.5", str(place / "earlier"), "--from", "4", config=None).code == 0
    refused(train("--export", "r0.5", str(to), config=None), f"`--export`: {to} exists. Give a folder that does not exist yet.")
    refused(
        train("--export", "nowhere", "x", config=None),
        "`--export nowhere`: it holds no run (run.json and config.toml). Give the folder of a run.",
    )
    refused(
        train("--export", "r0.5", "x"),
        "`--export RUN DIR` takes the run as it is: leave all others but `--from` out.",
    )
