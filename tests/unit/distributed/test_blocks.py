"""The blocks of models: what is gathered and computed again one at a time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from halfstep.config.run import LoraRun
from halfstep.distributed.blocks import all_blocks
from halfstep.train.adapters import with_adapters

SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2}
MODELS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "llama": (SMALL, {"LlamaDecoderLayer": 3}),
    "gpt2": ({"n_embd": 8, "n_layer": 3, "n_head": 2}, {"GPT2Block": 3}),
    "t5": ({"d_model": 8, "d_ff": 8, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2, "d_kv": 4}, {"T5Block": 5}),
    "mixtral": ({**SMALL, "num_local_experts": 2}, {"MixtralDecoderLayer": 3}),
}


def meta_model(name: str) -> nn.Module:
    with torch.device("meta"):
        return AutoModel.from_config(AutoConfig.for_model(name, **MODELS[name][0]))


@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_transformers_are_found_on_either_side(name: str) -> None:
    assert Counter(type(block).__name__ for block in all_blocks(meta_model(name))) == MODELS[name][1]


def test_adapters_leave_the_blocks_as_they_are() -> None:
    adapted = with_adapters(meta_model("llama"), LoraRun(rank=2, alpha=2, dropout=0.0, targets=("q_proj",)), ())
    assert Counter(type(block).__name__ for block in all_blocks(adapted)) == {"LlamaDecoderLayer": 3}


def test_what_only_repeats_is_found_too() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(4)], nn.Linear(2, 1))
    assert all_blocks(model) == list(model)[:4]
    assert all_blocks(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))) == []
