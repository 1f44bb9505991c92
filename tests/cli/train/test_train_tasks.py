"""Masked language models, classifiers of texts and images, adapters and the user's own through the real command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageColumn
from safetensors.torch import load_file
from train_command import CONFIG, Said, Train
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import hugging_face

FEW = ("precision=fp32", "limits.updates=4", "batch.global=8", "run.tensorboard=false", "run.folder=run")
REVIEWS = ("model.path=bert", "model.task=sequence-classification", "data.files=reviews.jsonl")
OWN = """
import torch
from torch.nn import functional as F

class Bigrams(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(256, width), torch.nn.Linear(width, 256)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))

def half(model, batch):
    logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100) / 2
"""


PIXELS = """
import torch

def data(label=1):
    return [
        {"pixel_values": torch.full((3, 16, 16), float(number % 2)), "labels": torch.tensor(number % 2 * label)}
        for number in range(40)
    ]
"""


@pytest.fixture
def bert(place: Path) -> None:
    """A BERT and reviews with labels."""
    hugging_face.bert(place / "bert")
    hugging_face.lines(place / "reviews.jsonl", hugging_face.reviews())


@pytest.fixture
def vit(place: Path) -> None:
    """A ViT and pictures of two classes."""
    hugging_face.vit(place / "vit")
    hugging_face.pictures(place / "images")


def entries(place: Path, kind: str, folder: str = "run") -> list[dict[str, Any]]:
    log = map(json.loads, (place / folder / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [entry for entry in log if entry["kind"] == kind]


def losses(place: Path, folder: str = "run") -> list[float]:
    return [entry["loss"] for entry in entries(place, "update", folder)]


def refused(said: Said) -> str:
    assert said.code == 2, said.err
    assert said.out == ""
    assert "Traceback" not in said.err
    return said.err.splitlines()[-1].removeprefix("halfstep: ")


@pytest.mark.usefixtures("bert")
def test_accuracy_and_loss_of_a_classifier_are_those_of_the_model_that_it_leaves(place: Path, train: Train) -> None:
    rows = [
        {"text": "the film was not good", "label": "bad"},
        {"text": "a great plot", "label": "good"},
        *hugging_face.reviews(5),
    ]
    hugging_face.lines(place / "held_out.jsonl", rows)
    words = (*FEW, *REVIEWS, "evaluation.files=held_out.jsonl", "batch.micro=2", "optimizer.learning_rate=0.01")
    assert train(*words, config=None).code == 0
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained("run/model"), AutoTokenizer.from_pretrained("run/model")
    assert model.config.label2id == {"bad": 0, "good": 1}
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(row["text"], return_tensors="pt")).logits for row in rows])
    labels = torch.tensor([model.config.label2id[row["label"]] for row in rows])
    last = entries(place, "evaluation")[-1]
    assert last["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)
    assert last["accuracy"] == pytest.approx(float((logits.argmax(-1) == labels).float().mean()))
    assert (last["perplexity"], last["nats_per_byte"]) == (None, None)


@pytest.mark.usefixtures("bert")
@pytest.mark.parametrize("words", [REVIEWS, ("model.path=bert", "data.files=text.txt")], ids=["classes", "masks"])
def test_micro_batches_and_a_run_of_its_own_configuration_change_nothing(
    place: Path, train: Train, words: tuple[str, ...]
) -> None:
    (place / "text.txt").write_text("the film was good\na story not a plot\n" * 200)
    assert train(*FEW, *words, "batch.micro=8", config=None).code == 0
    assert train(*FEW, *words, "batch.micro=1", "run.folder=small", config=None).code == 0
    assert train("run.folder=again", config="run/config.toml").code == 0
    assert losses(place, "small") == pytest.approx(losses(place), rel=1e-4, abs=1e-4)
    assert losses(place, "again") == losses(place)


@pytest.mark.slow
@pytest.mark.usefixtures("bert")
def test_two_ranks_hide_and_judge_what_one_does(place: Path, train: Train, train_apart: Train) -> None:
    (place / "text.txt").write_text("the film was good\na story not a plot\n" * 200)
    config = '[model]\npath = "bert"\n[data]\nfiles = "text.txt"\n'
    (place / "tiny.toml").write_text(config)
    words = (*FEW, "batch.micro=2", "evaluation.every_updates=4")
    assert train(*words).code == 0
    two = train_apart(*words, "processes=2", "run.folder=two")
    assert two.code == 0, two.err
    assert losses(place, "two") == pytest.approx(losses(place), rel=1e-4)
    one, both = (entries(place, "evaluation", folder)[-1] for folder in ("run", "two"))
    assert both["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert both["accuracy"] == pytest.approx(one["accuracy"], abs=0.02)


@pytest.mark.usefixtures("vit")
def test_a_folder_of_pictures_and_a_saved_dataset_are_the_same_run(place: Path, train: Train) -> None:
    files = [str(path) for path in sorted((place / "images").rglob("*.png"))]
    labels = [0 if "circle" in file else 1 for file in files]
    features = Features({"image": ImageColumn(), "label": ClassLabel(names=list(hugging_face.KINDS))})
    order = [
        files.index(str(path)) for kind in sorted(hugging_face.KINDS) for path in sorted((place / "images" / kind).iterdir())
    ]
    columns = {"image": [files[each] for each in order], "label": [labels[each] for each in order]}
    Dataset.from_dict(columns, features=features).save_to_disk("saved")
    assert train(*FEW, "model.path=vit", "data.files=images", config=None).code == 0
    assert train(*FEW, "model.path=vit", "data.files=saved", "run.folder=saved_run", config=None).code == 0
    assert losses(place, "saved_run") == losses(place)
    told = (place / "run" / "config.toml").read_text()
    assert 'classes = ["circle", "square"]  # the labels of the data, in the order of their names\n' in told
    assert "2 tensors were not in it and start at random: classifier.bias, classifier.weight" in told


@pytest.mark.usefixtures("vit")
def test_frozen_parts_stay_bitwise_and_the_rest_moves(place: Path, train: Train) -> None:
    before = load_file("vit/model.safetensors")
    assert train(*FEW, "model.path=vit", "data.files=images", "model.frozen=vit.embeddings", config=None).code == 0
    after = load_file("run/model/model.safetensors")
    kept = {name for name in before if before[name].equal(after[name])}
    assert {name for name in before if name.startswith("vit.embeddings.")} <= kept
    assert not any(name.startswith("vit.encoder.") for name in kept)


def test_adapters_move_what_they_stand_beside_and_nothing_else(place: Path, train: Train) -> None:
    hugging_face.llama(place / "llama")
    words = ("model.path=llama", "data.files=text.txt", "lora.targets=q_proj", "optimizer.learning_rate=0.1")
    assert train(*FEW, *words, "data.sequence_length=32", config=None).code == 0
    before, after = load_file("llama/model.safetensors"), load_file("run/model/model.safetensors")
    assert [name for name in before if not before[name].equal(after[name])] == ["model.layers.0.self_attn.q_proj.weight"]
    assert (place / "run" / "model" / "adapter" / "adapter_model.safetensors").is_file()


def test_a_model_of_ones_own_learns_from_text(place: Path, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(place))
    (place / "own_bigrams.py").write_text(OWN)
    config = CONFIG[: CONFIG.index("[model]")] + 'model = "own_bigrams:Bigrams"\n' + CONFIG[CONFIG.index("[data]") :]
    (place / "short.toml").write_text(config)
    assert "Bigrams.__init__() missing 1 required positional argument: 'width'" in refused(train(config="short.toml"))
    (place / "own.toml").write_text(config.replace('model = "own_bigrams:Bigrams"', ""))
    words = ("model.factory=own_bigrams:Bigrams", "model.config={width = 8}")
    assert train(*words, config="own.toml").code == 0
    assert entries(place, "evaluation")[-1]["perplexity"] > 1
    assert train(*words, "model.loss=own_bigrams:half", "run.folder=half", config="own.toml").code == 0
    assert losses(place, "half")[0] == pytest.approx(losses(place)[0] / 2, rel=1e-5)
    assert train("model.factory=own_bigrams:half", config="own.toml").code == 2


def test_a_model_of_transformers_learns_classes_from_data_of_ones_own(
    place: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(place))
    hugging_face.vit(place / "vit")
    (place / "own_pixels.py").write_text(PIXELS)
    words = (*FEW, "model.path=vit", "data.factory=own_pixels:data", "data.classes=['dark', 'light']")
    assert train(*words, "optimizer.learning_rate=0.01", "limits.updates=20", config=None).code == 0
    assert entries(place, "evaluation")[-1]["accuracy"] == 1.0
    assert json.loads(Path("run/model/config.json").read_text())["id2label"] == {"0": "dark", "1": "light"}
    wrong = train(*words, "data.config={label = 7}", "run.folder=wrong", config=None)
    assert refused(wrong).startswith("The model or its loss fails on the first batch: IndexError: Target 7 is out of bounds.")


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "a label outside the classes": (
        (*REVIEWS, "data.classes=['good', 'fair']"),
        'reviews.jsonl, line 1: the label "bad" is none of the 2 classes, which are "good", "fair".',
    ),
    "a class that only held-out data have": (
        (*REVIEWS, "evaluation.files=other.jsonl"),
        'other.jsonl, line 1: the label "fair" is none of the 2 classes, which are "bad", "good".',
    ),
    "a label that is none": (
        (*REVIEWS, "data.files=half.jsonl"),
        "half.jsonl, line 1: `label` is 0.5; a label is the name of a class or its number.",
    ),
    "a column that is not there": (
        (*REVIEWS, "data.columns=['text', 'class']"),
        "reviews.jsonl, line 1 has no column `class`. Its columns are `text`, `label`.",
    ),
    "one column for two": (
        (*REVIEWS, "data.columns=text"),
        '`data.columns` names 1 columns, and data of the kind "label" have 2, as ["text", "label"].',
    ),
    "text without labels": (
        (*REVIEWS, "data.files=text.txt"),
        'Text files have no labels, and the task "sequence-classification" needs them: name files with rows (JSON Lines, CSV, '
        "Parquet), or a folder that `datasets` has saved.",
    ),
    "no files": (
        ("model.path=bert", "model.task=sequence-classification"),
        "`data.files` are not given, and the task needs them.",
    ),
    "pictures for a text model": (
        ("model.path=bert", "data.files=images", "data.format=images"),
        '`data.format = "images"` holds nothing for the task "masked-lm": name text files, files with rows (JSON Lines, CSV, '
        "Parquet), or a folder that `datasets` has saved.",
    ),
    "rows for an image model": (
        ("model.path=vit", "data.files=reviews.jsonl", "data.format=jsonl"),
        '`data.format = "jsonl"` holds nothing for the task "image-classification": name a folder that holds a folder of '
        "pictures for each class, or one that `datasets` has saved.",
    ),
    "chats for a masked model": (
        ("model.path=bert", "data.files=reviews.jsonl", "data.kind=chat"),
        '`data.kind = "chat"` is not what the task "masked-lm" learns from, which is "text".',
    ),
    "a label that is split": (
        (*REVIEWS, "data.too_long=split"),
        '`data.too_long = "split"` cannot be: a label is that of a whole text. Use "cut" or "drop".',
    ),
    "packing of what is not packed": (
        (*REVIEWS, "data.packing=true"),
        '`data.packing` has no effect on the task "sequence-classification". Leave it out.',
    ),
    "chunks of what has no head for tokens": (
        (*REVIEWS, "model.loss_chunk=8"),
        '`model.loss_chunk = 8` cannot be: the task is "sequence-classification". Use 0, or leave it out.',
    ),
    "classes of tokens": (
        ("model.path=bert", "data.files=text.txt", "data.classes=['a', 'b']"),
        '`data.classes` has no effect on the task "masked-lm". Leave it out.',
    ),
    "an image size of text": (
        (*REVIEWS, "data.image_size=8"),
        '`data.image_size` has no effect on the task "sequence-classification". Leave it out.',
    ),
    "a length of pictures": (
        ("model.path=vit", "data.files=images", "data.sequence_length=8"),
        "`data.sequence_length` has no effect on data that are no tokens. Leave it out.",
    ),
    "two folders of pictures": (
        ("model.path=vit", "data.files=['images', 'vit']"),
        "`data.files` names 2 folders of pictures: it takes one, with a folder for each class in it.",
    ),
    "a file that is no picture": (
        ("model.path=vit", "data.files=broken"),
        "broken/cat/1.png is not a picture that opens: cannot identify image file 'broken/cat/1.png'",
    ),
    "a tokenizer of more tokens than the model": (
        ("model.path=bert", "data.files=text.txt", "data.tokenizer=llama"),
        "The tokenizer in llama knows 259 tokens, and the model knows 19. They do not fit.",
    ),
    "a pad token that is missing": (
        ("model.path=llama", "model.task=sequence-classification", "data.files=reviews.jsonl"),
        "The tokenizer in llama has no pad token, with which texts are filled up to one length. Name one of its tokens in its "
        'tokenizer_config.json, as "pad_token": "[PAD]".',
    ),
    "a frozen part that is none": (
        ("model.path=vit", "data.files=images", "model.frozen=heads"),
        '`model.frozen`: "heads" names no parameter of the model. Its parameters are vit.embeddings.cls_token, ',
    ),
    "a target that is none": (
        ("model.path=llama", "data.files=text.txt", "lora.targets=query"),
        '`lora.targets`: "query" names no module of the model. Its modules are model.embed_tokens, ',
    ),
    "frozen parts beside adapters": (
        ("model.path=llama", "data.files=text.txt", "lora.rank=2", "model.frozen=lm_head"),
        "`model.frozen` has no effect beside [lora], which freezes everything but the adapters. Leave it out.",
    ),
    "a task that the model cannot learn": (
        ("model.path=vit", "data.files=text.txt", "model.task=masked-lm"),
        "`model.path`: vit holds a vit model, which is no masked language model.",
    ),
    "a loss without data of its own": (
        ("model.task=own", "model.loss=a:b"),
        '`model.task = "own"` needs a loss and data of your own: `model.loss` and `data.factory`, each as "module:name".',
    ),
    "data of one's own for a model whose task nobody says": (
        ("model.factory=a:b", "data.factory=a:b"),
        "What a model of your own learns from data of your own is not known: give `model.loss`, or say what the model is by "
        '`model.task`, as "image-classification".',
    ),
    "data twice": (
        ("model.path=vit", "data.factory=a:b", "data.files=images"),
        "`data.factory` and `data.files` are both given. Leave one of them out.",
    ),
    "a tokenizer of pictures": (
        ("model.path=vit", "data.files=images", "data.tokenizer=bert"),
        "`data.tokenizer` has no effect on pictures. Leave it out.",
    ),
    "columns of data of one's own": (
        ("model.path=vit", "data.factory=a:b", "data.columns=['x', 'y']"),
        "`data.columns` has no effect on data of your own. Leave it out.",
    ),
    "held-out files beside data of one's own": (
        ("model.path=vit", "data.factory=a:b", "evaluation.files=images"),
        "`evaluation.files` has no effect on data of your own: let `data.factory` return a tuple of data to train on and data "
        "that are held out.",
    ),
    "smoothing of a loss of one's own": (
        ("model.path=bert", "data.files=text.txt", "model.loss=a:b", "model.label_smoothing=0.1"),
        "`model.label_smoothing` has no effect on a loss of your own. Leave it out.",
    ),
    "arguments of nothing": (
        ("data.config={x = 1}",),
        "`data.config` holds the arguments of `data.factory`, which is not given. Leave it out.",
    ),
    "a model twice": (
        ("model.factory=a:b", "model.path=bert"),
        "`model.factory` makes the model: leave `model.path` and `model.architecture` out.",
    ),
}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and data of every kind, to which nothing is ever added."""
    place = tmp_path_factory.mktemp("everything")
    hugging_face.bert(place / "bert")
    hugging_face.vit(place / "vit")
    hugging_face.llama(place / "llama")
    hugging_face.lines(place / "reviews.jsonl", hugging_face.reviews())
    hugging_face.lines(place / "other.jsonl", [{"text": "a plot", "label": "fair"}])
    hugging_face.lines(place / "half.jsonl", [{"text": "a plot", "label": 0.5}])
    hugging_face.pictures(place / "images", number=3)
    (place / "broken" / "cat").mkdir(parents=True)
    (place / "broken" / "cat" / "1.png").write_text("a cat")
    (place / "text.txt").write_text("the film was good\n" * 50)
    return place


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_one_sentence(wrong: str, train: Train, everything: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(everything)
    words, sentence = WRONG[wrong]
    said = refused(train(*FEW, *words, config=None))
    assert said.startswith(sentence) if sentence.endswith(", ") else said == sentence
    assert not (everything / "run").exists()
