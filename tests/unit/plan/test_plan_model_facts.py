import json
from pathlib import Path

import pytest

from halfstep.errors import ModelError
from halfstep.plan.known_models import KNOWN
from halfstep.plan.model_facts import Transformer, from_config
from halfstep.plan.reading import config_of

COUNTED_BY_TRANSFORMERS = {
    "llama-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "tinyllama-1.1b": 1_100_048_384,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "gemma-7b": 8_537_680_896,
    "phi-3-mini": 3_821_079_552,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "mpt-7b": 6_649_286_656,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "vit-base": 86_567_656,
}
"""`sum(p.numel() for p in model.parameters())` of transformers 5.24, on the meta device."""


@pytest.mark.parametrize(("name", "parameters"), COUNTED_BY_TRANSFORMERS.items())
def test_parameters_are_those_of_the_real_model(name: str, parameters: int) -> None:
    assert from_config(KNOWN[name], name).parameters == parameters


def test_a_token_meets_two_of_the_eight_experts_of_mixtral() -> None:
    mixtral = from_config(KNOWN["mixtral-8x7b"], "mixtral")
    assert isinstance(mixtral, Transformer)
    assert mixtral.block_matrices - mixtral.active_matrices == 6 * 3 * 4096 * 14336


def test_resnet50_computes_4_billion_products_an_image() -> None:
    assert from_config(KNOWN["resnet50"], "resnet50").flops == pytest.approx(2 * 4.09e9, rel=0.01)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["llama-7b", "meta-llama/Llama-2-7b-hf", "LLAMA-2-7B", "bert-base-uncased"])
def test_names_of_the_hub_are_known(name: str) -> None:
    assert config_of(name) in KNOWN.values()


def test_a_folder_and_its_config_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["gpt2"]))
    assert config_of(str(tmp_path)) == config_of(str(tmp_path / "config.json")) == KNOWN["gpt2"]


LLAMA = KNOWN["llama-7b"]
WRONG = {
    "m is a 'mamba' model, whose shapes the closed form does not know. The nearest it knows is llama.": {"model_type": "mamba"},
    "m: `hidden_size` is missing: it must be a whole number above 0.": {"model_type": "llama", "num_attention_heads": 4},
    "m: `num_hidden_layers` is -1: it must be a whole number above 0.": {**LLAMA, "num_hidden_layers": -1},
    "m: `vocab_size` is 'many': it must be a whole number above 0.": {**LLAMA, "vocab_size": "many"},
    "m: a hidden_size of 4096 cannot be split over 3 heads.": {**LLAMA, "num_attention_heads": 3},
}


@pytest.mark.parametrize(("message", "config"), WRONG.items())
def test_a_wrong_configuration_is_told_in_one_sentence(message: str, config: dict[str, object]) -> None:
    with pytest.raises(ModelError) as error:
        from_config(config, "m")
    assert str(error.value) == message


def test_files_that_are_no_configuration_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError) as error:
        config_of(str(tmp_path))
    path = tmp_path / "config.json"
    assert str(error.value) == f"{path} is not a model's configuration: it must be a JSON object with a `model_type`."
