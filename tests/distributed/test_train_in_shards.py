"""`halfstep train` with a model in shards trains as one process does, from fresh weights and from a folder."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from distributed.ranks import Ended
from halfstep.cli.main import main
from halfstep.config.load import load
from halfstep.train.interruption import interruptible
from halfstep.train.job import prepare, train
from halfstep.train.models import config_of_architecture, new_model

TEXT = "".join(f"line {number}: the quick brown fox jumps over {number * 7 % 13} lazy dogs\n" for number in range(120))
CONFIG = """\
precision = "fp32"
data = {{files = "{folder}/text.txt", sequence_length = 32, tokenizer = "bytes"}}
batch = {{global = 8, micro = 2}}
evaluation = {{every_updates = 3, share = 0.1}}
limits = {{updates = 3}}
checkpoint = {{every_updates = 3}}
optimizer = {{learning_rate = 1e-3}}
"""
LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}


def model_section(architecture: str, **config: Any) -> list[str]:
    pairs = [f"model.config.{key}={str(value).lower()}" for key, value in config.items()]
    return [f'model.architecture="{architecture}"', *pairs]


ZERO3 = ["sharding=zero3", *model_section("llama", **LLAMA, tie_word_embeddings=True)]
RUNS = {
    "zero3, tied embeddings": ZERO3,
    "zero2, activations computed again": ["sharding=zero2", "model.checkpoint_activations=true", *model_section("gpt2", **GPT2)],
    "adapters beside fresh weights": [*ZERO3, "lora.rank=2", 'lora.targets=["q_proj", "embed_tokens"]'],
    "adapters beside the folder of the first": ["sharding=zero3", "lora.rank=2"],
    "from the folder of the first": ["sharding=zero3", "precision=bf16"],
}
SHARDS, ALONE = "in shards", "alone"


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a run said of its losses, and why things were as they were."""

    losses: list[float | None]
    choices: dict[str, str]


def run_all(folder: str, where: str) -> list[Left]:
    """The runs one after the other; their folders are called after them."""
    return [run(Path(folder), f"{where}, {name}", settings) for name, settings in RUNS.items()]


def run(folder: Path, name: str, settings: list[str]) -> Left:
    model = [] if any("architecture" in setting for setting in settings) else [f'model.path="{folder}/first"']
    written = load(folder / "small.toml", [*settings, *model, f'run.folder="{folder}/{name}"', "run.tensorboard=false"])
    with interruptible() as interruption:
        job = prepare(written, started=datetime(2026, 11, 29))
        summary, _ = train(job, interruption, stream=io.StringIO())
    assert summary.final is not None
    choices = {key: str(choice) for key, choice in job.resolved.choices.items()}
    return Left(losses=[summary.train_loss, summary.final.loss], choices=choices)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A text, a configuration and a model to begin from."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "small.toml").write_text(CONFIG.format(folder=tmp_path))
    torch.manual_seed(5)
    new_model(config_of_architecture("llama", {**LLAMA, "vocab_size": 256})).save_pretrained(tmp_path / "first")
    return tmp_path


def assert_exported(place: Path, run_folder: str) -> None:
    """The checkpoint that two ranks wrote in shards is, on one process, the model that they left."""
    to = place / f"{run_folder}, exported"
    assert main(["train", "--export", str(place / run_folder), str(to)]) == 0
    exported, left = (load_file(folder / "model.safetensors") for folder in (to, place / run_folder / "model"))
    assert exported.keys() == left.keys()
    assert all(exported[what].equal(weight) for what, weight in left.items()), run_folder
    assert AutoModelForCausalLM.from_pretrained(to).num_parameters() > 0


def test_training_in_shards_from_fresh_weights_or_a_folder_is_that_of_one_process(
    started: Callable[..., list[Ended]], place: Path
) -> None:
    first, second = started(run_all, str(place), SHARDS)
    assert first.error is None, first.trace
    assert second.error is None, second.trace
    for name, settings, shards, same, alone in zip(
        RUNS, RUNS.values(), first.value, second.value, run_all(str(place), ALONE), strict=True
    ):
        half = "precision=bf16" in settings
        assert shards.losses == same.losses == pytest.approx(alone.losses, rel=1e-3 if half else 1e-5), name
        ours, theirs = (load_file(place / f"{where}, {name}" / "model" / "model.safetensors") for where in (SHARDS, ALONE))
        assert ours.keys() == theirs.keys()
        for what, weight in theirs.items():
            rounding = 5e-3 if half else 1e-5
            torch.testing.assert_close(
                ours[what], weight, rtol=1e-4, atol=rounding, msg=lambda said, what=what: f"{what}: {said}"
            )
        asked = settings[0].removeprefix("sharding=")
        assert shards.choices["sharding"] == f"{asked} (asked for)"
        assert alone.choices["sharding"] == f'none (one process, so that "{asked}" has nothing to divide)'
    for name in RUNS:
        assert_exported(place, f"{SHARDS}, {name}")
    for left in first.value[-2:]:  # adapters too stand beside weights that were nowhere whole
        assert left.choices["model.weights"] == f"{place}/first (every tensor was in it; each rank read its shards)"
