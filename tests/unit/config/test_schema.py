"""What the user wrote is checked, and every fault is one sentence."""

from __future__ import annotations

import pytest

from halfstep.config.load import load
from halfstep.config.options import OptimizerName, Precision, Tail
from halfstep.config.schema import known_keys
from halfstep.errors import ConfigError


def message(*settings: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(None, settings)
    return str(error.value)


def test_an_empty_configuration_leaves_everything_absent() -> None:
    written = load(None)
    assert written.precision is None
    assert written.batch.global_ is None
    assert written.model.path is None


def test_words_of_closed_lists_become_their_members() -> None:
    written = load(None, ["precision=bf16-pure", "batch.tail=drop", "optimizer.name=sgd"])
    assert written.precision is Precision.BF16_PURE
    assert written.batch.tail is Tail.DROP
    assert written.optimizer.name is OptimizerName.SGD


def test_auto_is_a_value_of_every_setting_that_can_be_decided() -> None:
    keys = ["precision", "device", "processes", "batch.global", "batch.micro", "batch.tail", "data.sequence_length"]
    assert load(None, [f"{key}=auto" for key in keys]).batch.micro == "auto"


def test_whole_numbers_are_taken_for_numbers() -> None:
    assert load(None, ["optimizer.learning_rate=1"]).optimizer.learning_rate == 1.0


def test_one_file_is_a_list_of_one() -> None:
    assert load(None, ["data.files=notes.txt"]).data.files == ["notes.txt"]


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("batch.mirco=3", "`batch.mirco` is not a key of the configuration. Did you mean `batch.micro`?"),
        ("bach.micro=3", "`bach` is not a key of the configuration. Did you mean [batch]?"),
        ("optimizer.lr=3", "`optimizer.lr` is not a key of the configuration. Did you mean `optimizer.learning_rate`?"),
        ("batch.precision=fp32", "`batch.precision` is not a key of the configuration. Did you mean `precision`?"),
        ("clip_norm=1", "`clip_norm` is not a key of the configuration. Did you mean `optimizer.clip_norm`?"),
        ("limits.max_steps=4", "`limits.max_steps` is not a key of the configuration. Did you mean `limits.updates`?"),
        (
            "batch.zzz=3",
            "`batch.zzz` is not a key of the configuration. The keys are `batch.global`, `batch.micro`, `batch.tail`.",
        ),
        (
            "zzz=3",
            "`zzz` is not a key of the configuration. The keys are `precision`, `device`, `processes`, `sharding`, `watch`, "
            "[model], [lora], [data], [batch], [optimizer], [scheduler], [evaluation], [limits], [checkpoint], [run].",
        ),
    ],
)
def test_an_unknown_key_is_named_with_the_one_that_was_meant(setting: str, sentence: str) -> None:
    assert message(setting) == sentence


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("batch.micro=many", '`batch.micro = "many"` is not right: it must be a whole number of sequences above 0, or "auto".'),
        ("batch.micro=0", '`batch.micro = 0` is not right: it must be a whole number of sequences above 0, or "auto".'),
        ("batch.micro=true", '`batch.micro = true` is not right: it must be a whole number of sequences above 0, or "auto".'),
        ("batch.global=2.5", '`batch.global = 2.5` is not right: it must be a whole number of sequences above 0, or "auto".'),
        ("batch=3", "`batch = 3` is not right: it must be a section with the keys global, micro, tail."),
        ("precision=fp8", '`precision = "fp8"` is not right: it must be "auto", "fp32", "fp16", "bf16" or "bf16-pure".'),
        (
            "optimizer.betas=[0.9, 1.0]",
            "`optimizer.betas = [0.9, 1.0]` is not right: it must be two numbers of at least 0 and below 1, "
            'as [0.9, 0.95], or "auto".',
        ),
        ("data.files=[1]", "`data.files = [1]` is not right: it must be a path or pattern of files, or a list of them."),
        ("limits.minutes=-1", "`limits.minutes = -1` is not right: it must be a number of minutes above 0."),
        ("run.seed=1979-05-27", '`run.seed = 1979-05-27` is not right: it must be a whole number of at least 0, or "auto".'),
        (
            "model.config=3",
            "`model.config = 3` is not right: it must be a table of the architecture's own configuration keys, or of the "
            "factory's arguments.",
        ),
    ],
)
def test_a_value_of_the_wrong_kind_is_shown_with_what_would_be_right(setting: str, sentence: str) -> None:
    assert message(setting) == sentence


def test_every_key_says_what_would_be_right() -> None:
    for key in known_keys():
        assert "must be " in message(f"{key}=1" if key.endswith(".config") else f"{key}={{nonsense = 1}}")
