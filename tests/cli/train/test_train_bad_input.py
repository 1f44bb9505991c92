"""Bad input is one sentence and exit code 2, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_command import Train
from transformers import LlamaConfig, LlamaForCausalLM


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below the folder with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(train: Train, place: Path, *words: str, config: str | None = "tiny.toml") -> str:
    """The sentence with which the command was refused."""
    before = contents(place)
    said = train(*words, config=config)
    assert said.code == 2
    assert said.out == ""
    assert contents(place) == before
    assert said.err.count("\n") == 1
    return said.err.removeprefix("halfstep: ").removesuffix("\n")


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["batch.mirco=4"], "`batch.mirco` is not a key of the configuration. Did you mean `batch.micro`?"),
        (
            ["batch.micro=3"],
            "`batch.global = 8` cannot be split into micro-batches of 3: 8 / 3 is not whole. Use 6 or 9, or `batch.micro = 2`.",
        ),
        (["data.files=no.txt"], "`data.files`: no.txt does not exist."),
        (["data.files=*.md"], '`data.files`: no file matches "*.md".'),
        (["evaluation.files=no.txt"], "`evaluation.files`: no.txt does not exist."),
        (
            ["evaluation.files=text.txt"],
            "Every file of `data.files` is also in `evaluation.files`: nothing is left to train on.",
        ),
        (
            ["data.tokenizer=nowhere"],
            '`data.tokenizer`: nowhere holds no tokenizer (tokenizer.json). Use "bytes" or another folder.',
        ),
        (
            ["model.architecture=lama"],
            '`model.architecture = "lama"` is not a causal language model of transformers. Did you mean "llama"?',
        ),
        (
            ["model.config.hiden_size=3"],
            '`model.config.hiden_size` is not a key of the "llama" configuration. Did you mean `hidden_size`?',
        ),
        (
            ["model.config.num_hidden_layers=0"],
            "The configuration of the llama asks for 0 layers: it takes 1.",
        ),
        (
            ["model.config.vocab_size=200"],
            "Bytes are 256 tokens, and the model knows 200. They do not fit.",
        ),
        (
            ["data.sequence_length=9999"],
            "`data.sequence_length = 9999` is longer than the context of the model, which is 2048 tokens. Use at most 2048.",
        ),
        (["device=gpu"], '`device = "gpu"` is not a device of torch. This machine has "cpu".'),
        (["--processes", "0"], '`processes = 0` is not right: it must be a whole number of processes above 0, or "auto".'),
    ],
)
def test_a_wrong_setting_is_one_sentence(train: Train, place: Path, words: list[str], sentence: str) -> None:
    if "gpu" in sentence and torch.accelerator.is_available():
        pytest.skip("the sentence is that of a machine without an accelerator")
    assert refused(train, place, *words) == sentence


def test_a_missing_configuration_is_named(train: Train, place: Path) -> None:
    assert refused(train, place, config="no.toml") == "The configuration file no.toml does not exist."


def test_an_empty_data_file_is_named(train: Train, place: Path) -> None:
    (place / "empty.txt").write_text("")
    assert refused(train, place, "data.files=empty.txt") == "`data.files`: empty.txt is empty."


def test_a_text_of_one_token_is_too_short(train: Train, place: Path) -> None:
    (place / "short.txt").write_text("x")
    assert refused(train, place, "data.files=short.txt") == "The text to train on is 1 tokens long: it takes at least 2."


def test_a_folder_that_holds_a_run_is_left_alone(train: Train, place: Path) -> None:
    (place / "run").mkdir()
    (place / "run" / "run.json").write_text("{}")
    sentence = "`run.folder`: run already holds a run. Give another folder, or move that run away."
    assert refused(train, place) == sentence


def test_a_folder_that_holds_something_else_is_left_alone(train: Train, place: Path) -> None:
    (place / "run").mkdir()
    (place / "run" / "thesis.tex").write_text("chapter 1")
    assert refused(train, place) == "`run.folder`: run is not empty. Give a folder that does not exist yet."


def test_a_file_is_no_run_folder(train: Train, place: Path) -> None:
    assert refused(train, place, "--run", "text.txt") == (
        "`run.folder`: text.txt is a file. Give a folder that does not exist yet."
    )


def from_folder(place: Path) -> str:
    """A configuration that loads the model of the folder `model`."""
    (place / "folder.toml").write_text(
        'precision = "fp32"\n[model]\npath = "model"\n[data]\nfiles = "text.txt"\nsequence_length = 32\n[run]\nfolder = "run"\n'
    )
    return "folder.toml"


def test_a_model_folder_that_does_not_exist_is_named(train: Train, place: Path) -> None:
    assert refused(train, place, config=from_folder(place)) == "`model.path`: the folder model does not exist."


def test_a_folder_without_a_configuration_is_no_model_folder(train: Train, place: Path) -> None:
    (place / "model").mkdir()
    assert refused(train, place, config=from_folder(place)) == (
        "`model.path`: model holds no config.json, so it is not a Hugging Face model folder."
    )


def test_a_model_folder_without_weights_is_named(train: Train, place: Path) -> None:
    small_model().config.save_pretrained("model")
    assert refused(train, place, config=from_folder(place)) == (
        "`model.path`: model holds no weights (model.safetensors). To start from random weights, give "
        "`model.architecture` and `model.config` instead."
    )


def test_a_model_of_another_kind_is_named(train: Train, place: Path) -> None:
    small_model().save_pretrained("model")
    (place / "model" / "config.json").write_text('{"model_type": "vit"}')
    assert refused(train, place, "model.task=causal-lm", config=from_folder(place)) == (
        "`model.path`: model holds a vit model, which is no causal language model."
    )


def test_damaged_weights_are_named(train: Train, place: Path) -> None:
    small_model().save_pretrained("model")
    weights = place / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    sentence = refused(train, place, config=from_folder(place))
    assert sentence.startswith("`model.path`: the weights in model cannot be loaded: ")


def test_a_parameter_that_is_not_finite_at_the_start_is_named(train: Train, place: Path) -> None:
    small_model().save_pretrained("model")
    weights = load_file("model/model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, "model/model.safetensors", metadata={"format": "pt"})
    assert refused(train, place, config=from_folder(place)) == (
        "Parameter `model.norm.weight` has 1 of 16 values that are not finite before the first update. "
        "Was the checkpoint damaged, or the initialisation skipped (`torch.empty`, `to_empty`)?"
    )
