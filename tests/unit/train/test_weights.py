"""Weights that come a part at a time: drawn as transformers draws a whole model, read from a folder, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from halfstep.errors import ModelError
from halfstep.train.models import new_model, shell
from halfstep.train.weights import Stored, drawn, fill, give_memory, read_shards, stored_in

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # said where one process reads
LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**LLAMA, "vocab_size": 50}),
    "tied": ("llama", {**LLAMA, "vocab_size": 50, "tie_word_embeddings": True}),
    "values that a parent draws again": ("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50}),
    "experts": (
        "mixtral",
        {**LLAMA, "vocab_size": 50, "num_local_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 2},
    ),
}


def config_of(name: str) -> Any:
    architecture, keys = MODELS[name]
    return AutoConfig.for_model(architecture, **keys, bos_token_id=None, eos_token_id=None)


@pytest.mark.parametrize("name", MODELS)
def test_values_drawn_a_block_at_a_time_are_those_of_a_model_drawn_whole(name: str) -> None:
    torch.manual_seed(0)
    ours = new_model(config_of(name))
    torch.manual_seed(0)
    whole = shell(config_of(name))
    whole.to_empty(device="cpu")
    whole.initialize_weights()  # type: ignore[operator]
    whole.tie_weights()  # type: ignore[operator]
    assert dict(ours.named_parameters()).keys() == dict(whole.named_parameters()).keys()
    for (what, tensor), (_, other) in zip(
        [*ours.named_parameters(), *ours.named_buffers()], [*whole.named_parameters(), *whole.named_buffers()], strict=True
    ):
        assert torch.equal(tensor, other), what


def test_what_is_drawn_is_on_the_meta_device_afterwards() -> None:
    """So that no more than a block and what lies outside the blocks ever has memory."""
    source = shell(config_of("llama"))
    blocks = source.model.layers
    for name, _ in drawn(source):
        alive = [index for index, block in enumerate(blocks) if not next(block.parameters()).is_meta]
        assert alive == ([int(name.split(".")[2])] if ".layers." in name else [])


def read(model: nn.Module, folder: Path) -> Stored:
    stored = stored_in(str(folder), model)
    held = model.state_dict(keep_vars=True)
    read_shards(str(folder), {name: held[name] for name in stored.read})
    return stored


def test_a_folder_fills_a_model_without_memory(tmp_path: Path) -> None:
    torch.manual_seed(1)
    saved = AutoModelForCausalLM.from_config(config_of("tied"), attn_implementation="eager")
    saved.save_pretrained(tmp_path)
    model = shell(config_of("tied"))
    give_memory(model, torch.device("cpu"))
    stored = read(model, tmp_path)
    fill(model, drawn(shell(config_of("tied")), stored.given))
    assert str(stored.choice(str(tmp_path))) == f"{tmp_path} (every tensor was in it; each rank read its shards)"
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, saved(tokens).logits)


def test_what_a_folder_lacks_is_drawn_and_said(tmp_path: Path) -> None:
    saved = AutoModelForCausalLM.from_config(config_of("tied"))
    saved.save_pretrained(tmp_path)
    model = shell(config_of("llama"))
    give_memory(model, torch.device("cpu"))
    stored = read(model, tmp_path)
    fill(model, drawn(shell(config_of("llama")), stored.given))
    assert stored.choice("").reason == "1 tensors were not in it and start at random: lm_head.weight"
    assert bool(torch.isfinite(model.lm_head.weight).all())


def test_tensors_of_other_names_are_a_sentence(tmp_path: Path) -> None:
    LlamaForCausalLM(config_of("llama")).model.save_pretrained(tmp_path)
    with pytest.raises(ModelError) as told:
        stored_in(str(tmp_path), shell(config_of("llama")))
    assert str(told.value) == (
        f"`model.path`: {tmp_path} holds `embed_tokens.weight`, which LlamaForCausalLM has not, and lacks `lm_head.weight`: its "
        'tensors cannot be read into shards as they are. Use `sharding = "ddp"`, or save the model anew with transformers\' '
        "`save_pretrained`."
    )


def test_a_folder_without_safetensors_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as told:
        stored_in(str(tmp_path), shell(config_of("llama")))
    assert str(told.value) == (
        f"`model.path`: {tmp_path} holds no safetensors, which are what can be read into shards. Save the model anew with "
        'transformers\' `save_pretrained`, or use `sharding = "ddp"`.'
    )


def test_a_value_that_nobody_draws_is_a_sentence() -> None:
    model = shell(config_of("llama"))
    model.model.extra = nn.ParameterList([torch.empty(3, device="meta")])
    with pytest.raises(ModelError) as told:
        list(drawn(model))
    assert str(told.value) == (
        "transformers gives `model.extra.0` of LlamaForCausalLM a value only where the model is made whole: it cannot be made in "
        'shards. Use `sharding = "ddp"`, or load it with `model.path`.'
    )
