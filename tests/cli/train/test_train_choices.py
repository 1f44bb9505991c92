"""What a configuration can ask of loss, schedule, averaging and stopping, through the real command."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from train_command import Train


def log(place: Path, kind: str, folder: str = "run") -> list[dict[str, Any]]:
    lines = (place / folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


def configuration(place: Path) -> str:
    return (place / "run" / "config.toml").read_text(encoding="utf-8")


def test_the_chunked_loss_gives_the_same_run_as_whole_logits(place: Path, train: Train) -> None:
    assert train("model.loss_chunk=7").code == 0
    assert train("model.loss_chunk=0", "run.folder=whole").code == 0
    assert "loss_chunk = 7\n" in configuration(place)
    chunked, whole = ([entry["loss"] for entry in log(place, "update", folder)] for folder in ("run", "whole"))
    assert chunked == pytest.approx(whole, rel=1e-5)


def test_without_asking_small_logits_are_made_whole_and_the_reason_is_kept(place: Path, train: Train) -> None:
    assert train().code == 0
    reason = "the FP32 logits of 64 tokens over a vocabulary of 256 are 0 MB: too little to save"
    assert f"loss_chunk = 0  # {reason}\n" in configuration(place)


def test_label_smoothing_is_in_the_training_loss_and_not_in_the_held_out_one(place: Path, train: Train) -> None:
    words = ("limits.updates=1", "optimizer.learning_rate=1e-12", "evaluation.every_updates=1")
    assert train(*words).code == 0
    assert train(*words, "model.label_smoothing=0.5", "run.folder=smooth").code == 0
    held_out = [log(place, "evaluation", folder)[0]["loss"] for folder in ("run", "smooth")]
    training = [log(place, "update", folder)[0]["loss"] for folder in ("run", "smooth")]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-6)
    assert training[0] != pytest.approx(training[1], rel=1e-6)


def test_wsd_warms_up_stays_and_decays(place: Path, train: Train) -> None:
    assert train("scheduler.name=wsd", "scheduler.warmup_updates=1", "scheduler.decay_updates=2", "limits.updates=6").code == 0
    rates = [entry["lr"] for entry in log(place, "update")]
    shares = [0.5, 1, 1, 1, 1 - 0.95 * math.sqrt(0.5), 0.05]
    assert rates == pytest.approx([max(rates) * share for share in shares])


def test_a_decay_for_a_course_without_one_is_refused(train: Train) -> None:
    said = train("scheduler.decay_updates=2")
    assert said.code == 2
    assert '`scheduler.decay_updates` has no effect on "cosine": it belongs to "wsd". Leave it out.' in said.err


def test_warm_up_and_decay_longer_than_the_run_are_refused(train: Train) -> None:
    said = train("scheduler.name=wsd", "scheduler.warmup_updates=4", "scheduler.decay_updates=4")
    assert said.code == 2
    assert (
        "`scheduler.warmup_updates = 4` and `scheduler.decay_updates = 4` are more than the run's 6 updates. Use less of either."
    ) in said.err


def test_averaged_weights_are_judged_and_saved(place: Path, train: Train) -> None:
    assert train("optimizer.ema_decay=0.9", "run.folder=averaged").code == 0
    assert train().code == 0
    averaged, own = (load_file(place / folder / "model" / "model.safetensors") for folder in ("averaged", "run"))
    assert averaged.keys() == own.keys()
    assert any(not averaged[name].equal(own[name]) for name in own)
    losses = [log(place, "evaluation", folder)[-1]["loss"] for folder in ("averaged", "run")]
    assert losses[0] != losses[1]


def test_a_run_that_gets_no_better_ends_early(place: Path, train: Train) -> None:
    said = train("optimizer.learning_rate=1e-30", "evaluation.every_updates=1", "evaluation.patience=2", "limits.updates=50")
    assert said.code == 0
    assert len(log(place, "update")) == 3
    assert "2 looks in a row were not better than loss 5." in (place / "run" / "run.json").read_text()


class Heard(logging.Handler):
    """What a logger was told."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_an_architecture_on_bytes_has_none_of_the_special_tokens_that_it_has_elsewhere(place: Path, train: Train) -> None:
    """GPT-2's own are number 50,256, which a vocabulary of 256 bytes does not reach, and transformers warns of that."""
    config = "model.config={n_embd = 8, n_layer = 1, n_head = 1, n_positions = 64}"
    heard, logger = Heard(), logging.getLogger("transformers")
    logger.addHandler(heard)
    try:
        assert train("model.architecture=gpt2", config, "limits.updates=1").code == 0
    finally:
        logger.removeHandler(heard)
    assert heard.messages == []
    saved = json.loads((place / "run" / "model" / "config.json").read_text())
    assert (saved.get("bos_token_id"), saved.get("eos_token_id")) == (None, None)


def test_a_watched_run_is_bitwise_the_same_and_leaves_its_findings(place: Path, train_apart: Train) -> None:
    assert train_apart("run.folder=alone").code == 0
    said = train_apart("watch=true")
    assert said.code == 0, said.err
    watched, alone = (load_file(place / folder / "model" / "model.safetensors") for folder in ("run", "alone"))
    assert all(watched[name].equal(alone[name]) for name in alone)
    assert json.loads((place / "run" / "watch.json").read_text())["findings"] is not None
    assert "run, rank 0" in (place / "run" / "watch.html").read_text()
    assert not (place / "alone" / "watch.html").exists()
    assert "watch = true" in configuration(place)


def test_a_watched_run_that_is_stopped_leaves_its_findings_too(place: Path, train_apart: Train) -> None:
    said = train_apart(
        "watch=true", "optimizer.learning_rate=1e30", "optimizer.clip_norm=0", "precision=fp32", "limits.updates=30"
    )
    assert said.code == 1, said.err
    found = json.loads((place / "run" / "watch.json").read_text())["findings"]
    assert "large-updates" in {finding["rule"] for finding in found}
