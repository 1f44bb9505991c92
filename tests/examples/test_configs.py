"""Each configuration in `examples/configs` runs as it is, on tiny models and data, and learns what it is there to learn."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForSequenceClassification

import hugging_face
from halfstep.cli.main import main

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
SHORT = ("precision=fp32", "limits.updates=3", "evaluation.every_updates=3", "batch.global=8", "run.tensorboard=false")


def texts(place: Path) -> None:
    hugging_face.lines(place / "data/documents/1.jsonl", [{"text": row["text"]} for row in hugging_face.reviews()])


def chats(place: Path) -> None:
    hugging_face.lines(place / "data/chats.jsonl", hugging_face.chats())


def full(place: Path) -> None:
    hugging_face.llama(place / "models/llama")
    texts(place)


def chatting(place: Path) -> None:
    hugging_face.llama(place / "models/llama")
    chats(place)


def books(place: Path) -> None:
    hugging_face.byte_tokenizer(place / "models/gpt2")
    (place / "data/books").mkdir(parents=True)
    (place / "data/books/1.txt").write_text("the film was good\n" * 400)


def reviews(place: Path) -> None:
    hugging_face.bert(place / "models/bert")
    hugging_face.lines(place / "data/reviews.jsonl", hugging_face.reviews())


def images(place: Path) -> None:
    hugging_face.pictures(place / "data/images")


def images_and_vit(place: Path) -> None:
    hugging_face.vit(place / "models/vit")
    images(place)


def module(place: Path) -> None:
    shutil.copy(CONFIGS / "own_model.py", place)


RUNS: dict[str, tuple[Callable[[Path], None], type | None, tuple[str, ...]]] = {
    "llama_full": (full, AutoModelForCausalLM, ()),
    "llama_lora": (chatting, AutoModelForCausalLM, ()),
    "instruction_tuning": (chatting, AutoModelForCausalLM, ()),
    "gpt2": (books, AutoModelForCausalLM, ("model.config.n_layer=1",)),
    "bert_classification": (reviews, AutoModelForSequenceClassification, ()),
    "resnet": (images, AutoModelForImageClassification, ()),
    "vit": (images_and_vit, AutoModelForImageClassification, ()),
    "own_model": (module, None, ("batch.global=50", "limits.updates=360", "evaluation.every_updates=360")),
}
"""What each needs beside it, what loads the model that it leaves, and settings that keep it short."""


def test_every_configuration_is_run() -> None:
    assert sorted(RUNS) == sorted(path.stem for path in CONFIGS.glob("*.toml"))


@pytest.mark.parametrize("name", RUNS)
def test_a_configuration_trains_and_leaves_a_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, loader, more = RUNS[name]
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [word for setting in (*SHORT, *more) for word in ("--set", setting)]
    assert main(["train", str(CONFIGS / f"{name}.toml"), "--run", "run", *words]) == 0
    summary = json.loads(Path("run/run.json").read_text())["summary"]
    assert summary["ending"] == "finished"
    assert summary["final"]["update"] == summary["applied_updates"]
    if loader is None:
        assert Path("run/model/model.safetensors").is_file()
        assert summary["final"]["loss"] < 0.02, "the distance is learned: its variance is 0.18"
    else:
        assert next(loader.from_pretrained("run/model").parameters()).isfinite().all()
