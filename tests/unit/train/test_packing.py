"""Packed documents give the loss and the gradients of unpacked ones."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from halfstep.train.documents import Documents, documents_of
from halfstep.train.loss import WholeLogits
from halfstep.train.models import config_of_architecture, new_model
from halfstep.train.order import grouped_by_length
from halfstep.train.packing import Packed, Padding, best_fit, mixes_documents, pack
from halfstep.train.padded import Padded, padding_of

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "num_key_value_heads": 1},
    "qwen2": {**SMALL, "num_key_value_heads": 2},
    "qwen3": {**SMALL, "num_key_value_heads": 2, "head_dim": 8},
    "gpt2": {
        "vocab_size": 50,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
}


def model_of(name: str, attention: str) -> nn.Module:
    """With weights large enough for a token to feel every other that it looks at."""
    model = new_model(config_of_architecture(name, ARCHITECTURES[name]), attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)
    return model


def some_documents(lengths: tuple[int, ...] = (7, 1, 12, 3, 5, 2, 9)) -> Documents:
    pieces = [torch.randint(0, 50, (length,)).tolist() for length in lengths]
    counted = [[bool(torch.rand(()) < 0.8) for _ in piece] for piece in pieces]
    return documents_of(pieces, counted)


def loss_and_gradients(model: nn.Module, batches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor, list[Tensor]]:
    model.zero_grad()
    parts = [WholeLogits()(model, batch) for batch in batches]
    total = torch.stack([part[0] for part in parts]).sum()
    total.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return total.detach(), torch.stack([part[1] for part in parts]).sum(), gradients


@pytest.mark.parametrize("attention", ["sdpa", "eager", "matmul"])
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_loss_and_gradients_of_packed_padded_and_single_documents_are_equal(name: str, attention: str) -> None:
    model, documents = model_of(name, attention), some_documents()
    packed, padded = Packed(documents, 16), Padded(documents)
    alone = loss_and_gradients(model, [padded[index] for index in range(len(padded))])
    together = loss_and_gradients(model, [packed.__getitems__(range(len(packed)))])
    filled = loss_and_gradients(model, [padded.__getitems__(range(len(padded)))])
    assert len(packed) < len(documents)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(filled, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "matmul"])
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_models_that_keep_documents_apart_are_recognised(name: str, attention: str) -> None:
    assert mixes_documents(model_of(name, attention), 50) is None


def test_models_that_mix_documents_are_recognised() -> None:
    recurrent = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "time_step_rank": 2}
    mamba = new_model(config_of_architecture("mamba", recurrent))
    assert mixes_documents(mamba, 50) in (
        "MambaForCausalLM takes no `position_ids`",
        "MambaForCausalLM lets a document see the one before it",
    )
    blind = model_of("llama", "eager")
    blind.register_forward_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "position_ids": None}), with_kwargs=True)
    assert mixes_documents(blind, 50) == "LlamaForCausalLM lets a document see the one before it"


def test_a_packed_batch_is_what_it_should_be() -> None:
    documents = documents_of([[1, 2, 3], [4, 5], [6, 7, 8, 9]], [[True] * 3, [True, False], [True] * 4])
    batch = Packed(documents, 6, [np.array([2, 1]), np.array([0])]).__getitems__([0, 1])
    assert batch["input_ids"].tolist() == [[6, 7, 8, 9, 4, 5], [1, 2, 3, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2]]
    assert batch["labels"].tolist() == [[-100, 7, 8, 9, -100, -100], [-100, 2, 3, -100, -100, -100]]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(1, 25))
def test_every_document_is_in_one_sequence_that_holds_it(lengths: list[int], pool: int) -> None:
    packs = pack(np.array(lengths), 30, pool=pool)
    assert sorted(index for each in packs for index in each.tolist()) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in each) <= 30 for each in packs)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7))
def test_best_fit_keeps_its_bound(lengths: list[int]) -> None:
    fewest = min(_first_fit(order, 12) for order in set(itertools.permutations(lengths)))
    assert len(best_fit(lengths, 12)) <= 11 / 9 * fewest + 6 / 9


def _first_fit(lengths: tuple[int, ...], capacity: int) -> int:
    """Over all orders of the documents, the best that this finds is the optimum."""
    rooms: list[int] = []
    for length in lengths:
        place = next((at for at, room in enumerate(rooms) if room >= length), None)
        if place is None:
            rooms.append(capacity - length)
        else:
            rooms[place] -= length
    return len(rooms)


def test_many_documents_leave_hardly_any_padding() -> None:
    lengths = np.random.default_rng(0).integers(4, 400, 5000)
    packed = Packed(documents_of([[0] * int(length) for length in lengths]), 512)
    assert packed.padding.share < 0.01
    assert str(Padding(tokens=90, places=120)) == "25.0% of 120 places are padding"


@given(st.lists(st.integers(1, 99), max_size=50), st.integers(1, 7), st.integers(0, 3))
def test_grouping_keeps_every_document_once_and_depends_on_the_seed_alone(lengths: list[int], size: int, epoch: int) -> None:
    order = grouped_by_length(np.array(lengths), seed=1, epoch=epoch, global_batch=size, pool=3)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    again = grouped_by_length(np.array(lengths), seed=1, epoch=epoch, global_batch=size, pool=3)
    assert order.tolist() == again.tolist()


def test_grouping_pads_less_than_shuffling() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 2000)
    order = grouped_by_length(lengths, seed=0, epoch=0, global_batch=16)
    shuffled = np.random.default_rng(1).permutation(2000)
    grouped, random = (padding_of(lengths, each.reshape(-1, 16).tolist()) for each in (order, shuffled))
    assert grouped.tokens == random.tokens == int(lengths.sum())
    assert grouped.share < 0.05 < random.share
