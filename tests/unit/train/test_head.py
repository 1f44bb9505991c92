"""The loss on hidden states is that on logits, for the models of transformers that allow it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import ModelError
from halfstep.train.head import ChunkedLogits, causal_loss, choose_chunk, obstacle
from halfstep.train.loss import WholeLogits
from halfstep.train.models import config_of_architecture, new_model

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
GATED = {**SMALL, "intermediate_size": 32, "num_key_value_heads": 2}
OLD_NAME_IN_PEFT = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": GATED,
    "qwen2": {**GATED, "tie_word_embeddings": True},
    "gpt2": {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": None, "eos_token_id": None},
    "phi": {**GATED, "bos_token_id": None, "eos_token_id": None},
}


def model_of(name: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    return new_model(config_of_architecture(name, {**ARCHITECTURES.get(name, GATED), **more}), "eager")


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, 50, (3, 12))
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.rand(3, 12) < 0.3, -100)}


def gradients(model: nn.Module, loss: Any, given: dict[str, Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    model.zero_grad()
    torch.manual_seed(7)  # of dropout
    total, weight = loss(model, given)
    total.backward()
    return total.detach(), weight, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_loss_weight_and_all_gradients_are_those_of_whole_logits(name: str) -> None:
    model, given = model_of(name), batch()
    assert obstacle(model) is None
    ours = gradients(model, ChunkedLogits(tokens_at_once=5), given)
    torch.testing.assert_close(ours, gradients(model, WholeLogits(), given), rtol=1e-4, atol=1e-5)


def test_label_smoothing_is_the_same_in_both() -> None:
    model, given = model_of("llama"), batch()
    chunked = gradients(model, causal_loss(5, label_smoothing=0.1), given)
    torch.testing.assert_close(chunked, gradients(model, causal_loss(0, label_smoothing=0.1), given), rtol=1e-4, atol=1e-5)


def test_a_frozen_body_leaves_only_the_heads_gradient() -> None:
    model, given = model_of("llama"), batch()
    model.requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)  # type: ignore[operator]
    ours = gradients(model, ChunkedLogits(tokens_at_once=5), given)
    assert len(ours[2]) == 1
    torch.testing.assert_close(ours, gradients(model, WholeLogits(), given), rtol=1e-4, atol=1e-5)


def test_no_hook_is_left_on_the_head_even_after_an_error() -> None:
    model = model_of("llama")
    head = model.get_output_embeddings()  # type: ignore[operator]
    with pytest.raises(IndexError):
        ChunkedLogits(tokens_at_once=5)(model, {**batch(), "input_ids": torch.tensor([[50]])})
    ChunkedLogits(tokens_at_once=5)(model, batch())
    assert not head._forward_pre_hooks
    assert not head._forward_hooks


def test_logits_that_are_changed_behind_the_head_are_found() -> None:
    cause = "its logits are not what its head returns: something is done to them afterwards"
    assert obstacle(model_of("gemma2", head_dim=8, final_logit_softcapping=3.0)) == cause
    assert obstacle(model_of("cohere", logit_scale=0.5)) == cause


@OLD_NAME_IN_PEFT
def test_a_lora_head_falls_back_with_its_name() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model_of("llama"), peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"]))
    choice = choose_chunk(model, micro_tokens=10**9)
    assert choice.value == 0
    assert choice.reason == "whole logits, because its head is a Linear of peft.tuners.lora.layer and not torch's own"


@OLD_NAME_IN_PEFT
def test_lora_elsewhere_leaves_chunks_possible() -> None:
    peft = pytest.importorskip("peft")
    model, given = model_of("llama"), batch()
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    ours = gradients(model, ChunkedLogits(tokens_at_once=5), given)
    assert len(ours[2]) == 4
    torch.testing.assert_close(ours, gradients(model, WholeLogits(), given), rtol=1e-4, atol=1e-5)


def test_the_choice_says_what_it_saves() -> None:
    model = model_of("llama", vocab_size=50)
    assert choose_chunk(model, micro_tokens=4096).reason == (
        "the FP32 logits of 4,096 tokens over a vocabulary of 50 are 1 MB: too little to save"
    )
    large = choose_chunk(model, micro_tokens=10**6)
    assert large.value > 0
    assert large.reason == "the FP32 logits of 1,000,000 tokens over a vocabulary of 50 are 200 MB, of a chunk 67 MB"


def test_what_was_asked_for_is_taken_or_refused_in_a_sentence() -> None:
    assert choose_chunk(model_of("llama"), micro_tokens=1, asked=64).value == 64
    assert choose_chunk(model_of("llama"), micro_tokens=10**9, asked=0).value == 0
    with pytest.raises(ModelError) as error:
        choose_chunk(nn.Linear(2, 2), micro_tokens=1, asked=64)
    assert str(error.value) == (
        "`model.loss_chunk = 64` cannot be: Linear names no language-model head (`get_output_embeddings`). "
        "Use 0, or leave it out."
    )


def test_trying_a_model_leaves_no_trace() -> None:
    model = model_of("gpt2").train()
    random = torch.get_rng_state()
    assert obstacle(model) is None
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
