"""Sequences of tokens, and the loss over them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.train.loss import IGNORED, WholeLogits, next_tokens
from halfstep.train.windows import Windows


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Bigrams(nn.Module):
    """Logits of the next token from the present one alone."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(vocabulary, vocabulary, generator=generator))

    def forward(self, input_ids: Tensor) -> Output:
        return Output(self.table[input_ids])


def tokens_of_length(length: int) -> np.ndarray:
    return (np.arange(length) * 7 % 11).astype(np.uint8)


@settings(deadline=None)
@given(num_tokens=st.integers(2, 60), length=st.integers(2, 12))
def test_the_loss_over_all_sequences_is_that_of_the_text_in_one(num_tokens: int, length: int) -> None:
    model = Bigrams(11)
    tokens = tokens_of_length(num_tokens)
    windows = Windows(tokens, length)
    total, count = WholeLogits()(model, windows.__getitems__(range(len(windows))))
    whole = torch.from_numpy(tokens.astype(np.int64))
    expected = F.cross_entropy(model.table[whole[:-1]], whole[1:], reduction="sum")
    assert int(count) == num_tokens - 1
    torch.testing.assert_close(total, expected)


def test_what_fills_up_the_last_sequence_is_not_to_be_predicted() -> None:
    batch = Windows(tokens_of_length(6), 4)[1]
    assert batch["labels"].tolist() == [[10, 6, 2, IGNORED]]


def test_one_sequence_is_a_batch_of_one() -> None:
    windows = Windows(tokens_of_length(20), 5)
    assert windows[2]["input_ids"].shape == (1, 5)


def test_labels_are_moved_by_one_place() -> None:
    assert next_tokens(torch.tensor([[1, 2, 3]])).tolist() == [[2, 3, IGNORED]]


def test_the_loss_is_summed_in_fp32_under_autocast() -> None:
    batch = Windows(tokens_of_length(20), 5).__getitems__([0, 1])
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = WholeLogits()(Bigrams(11).bfloat16(), batch)
    assert total.dtype == torch.float32


def test_masked_labels_do_not_count() -> None:
    batch = Windows(tokens_of_length(5), 5).__getitems__([0])
    batch["labels"][:] = IGNORED
    total, count = WholeLogits()(Bigrams(11), batch)
    assert (float(total.detach()), int(count)) == (0.0, 0)


@pytest.mark.parametrize("length", [2, 5])
def test_a_dataset_counts_its_sequences(length: int) -> None:
    windows = Windows(tokens_of_length(9), length)
    assert len(windows) == -(-8 // (length - 1))
