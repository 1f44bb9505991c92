"""Texts between special tokens: filled up, cut, and with tokens hidden as in the BERT paper."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from halfstep.config.options import Task, TooLong
from halfstep.errors import ConfigError, DataError, ModelError
from halfstep.train.documents import Documents, documents_of
from halfstep.train.framed import Frame, Framed, fit_framed, frame_of, with_classes
from halfstep.train.loss import IGNORED
from hugging_face import SPECIAL, byte_tokenizer, word_tokenizer

PAD, UNKNOWN, CLS, SEP, MASK = range(len(SPECIAL))
FIRST = len(SPECIAL)


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Frame:
    return frame_of(word_tokenizer(tmp_path_factory.mktemp("words")), "words", Task.MASKED_LM)


def long_text(tokens: int) -> Documents:
    return documents_of([(np.arange(tokens) % 14 + FIRST).tolist()])


def test_a_frame_is_what_the_tokenizer_writes_around_a_text(masked: Frame) -> None:
    assert (masked.before, masked.after, masked.padding, masked.tokens) == ((CLS,), (SEP,), PAD, 2)


def test_texts_of_different_lengths_are_filled_up_and_the_model_is_told(masked: Frame) -> None:
    texts = documents_of([[7, 8, 9], [10]])
    labelled = with_classes(texts_with_labels(texts, [0, 1], ("b", "a")), ["a", "b"])
    batch = Framed(labelled, masked).__getitems__([0, 1])
    assert batch["input_ids"].tolist() == [[CLS, 7, 8, 9, SEP], [CLS, 10, SEP, PAD, PAD]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch["labels"].tolist() == [1, 0]


def texts_with_labels(texts: Documents, labels: list[int], names: tuple[str, ...]) -> Documents:
    return Documents(
        tokens=texts.tokens,
        counted=texts.counted,
        starts=texts.starts,
        lengths=texts.lengths,
        labels=np.array(labels),
        label_names=names,
    )


def test_tokens_are_hidden_in_the_shares_of_the_bert_paper(masked: Frame) -> None:
    """15% are predicted; of them 80% are [MASK], 10% another token, 10% as they were. Bounds: five standard deviations."""
    text = long_text(40_000)
    batch = Framed(text, masked)[3]
    original = torch.tensor([CLS, *text.tokens.tolist(), SEP])
    inputs, labels = batch["input_ids"][0], batch["labels"][0]
    hidden = labels != IGNORED
    assert torch.equal(labels[hidden], original[hidden])
    assert torch.equal(inputs[~hidden], original[~hidden])
    assert not hidden[[0, -1]].any()
    number = int(hidden.sum())
    assert number / 40_000 == pytest.approx(0.15, abs=5 * (0.15 * 0.85 / 40_000) ** 0.5)
    bound = 5 * (0.8 * 0.2 / number) ** 0.5
    assert float((inputs[hidden] == MASK).float().mean()) == pytest.approx(0.8 + 0.1 / 19, abs=bound)
    assert float((inputs[hidden] == original[hidden]).float().mean()) == pytest.approx(0.1 + 0.1 / 19, abs=bound)


def test_what_is_hidden_in_a_text_does_not_depend_on_its_neighbours(masked: Frame) -> None:
    """So that any number of ranks, and any micro-batch, sees the same."""
    samples = Framed(documents_of([list(range(FIRST, FIRST + 12)), list(range(FIRST, FIRST + 4))]), masked)
    together, alone = samples.__getitems__([5, 2]), samples.__getitems__([5])
    assert together["input_ids"][0, :6].tolist() == alone["input_ids"][0].tolist()
    assert together["labels"][0, :6].tolist() == alone["labels"][0].tolist()


def test_another_number_of_the_same_text_hides_other_tokens(masked: Frame) -> None:
    samples = Framed(long_text(200), masked)
    first, again, other = samples[0], samples[0], samples[1]
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert not torch.equal(first["labels"], other["labels"])


def test_documents_fit_with_their_frame(masked: Frame) -> None:
    texts = documents_of([list(range(5, 15)), [5]])
    assert fit_framed(texts, 6, TooLong.CUT, masked).documents.lengths.tolist() == [4, 1]
    assert fit_framed(texts, 6, TooLong.DROP, masked).documents.lengths.tolist() == [1]
    assert fit_framed(texts, 6, TooLong.SPLIT, masked).documents.lengths.tolist() == [4, 4, 2, 1]
    assert str(fit_framed(texts, 6, TooLong.CUT, masked)).startswith("1 of 2 documents are longer than 4 tokens and were cut")


def test_a_sequence_without_room_and_documents_that_all_go_are_refused(masked: Frame) -> None:
    with pytest.raises(ConfigError) as error:
        fit_framed(long_text(9), 2, TooLong.CUT, masked)
    assert str(error.value) == "`data.sequence_length = 2` leaves no room between 2 special tokens."
    with pytest.raises(DataError, match="No document is left to train on: 1 of 1 documents are longer than 4 tokens"):
        fit_framed(long_text(9), 6, TooLong.DROP, masked)


def test_a_tokenizer_without_the_token_that_is_needed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        frame_of(byte_tokenizer(tmp_path / "bytes"), "bytes", Task.SEQUENCE_CLASSIFICATION)
    assert str(error.value) == (
        "The tokenizer in bytes has no pad token, with which texts are filled up to one length. Name one of its tokens in its "
        'tokenizer_config.json, as "pad_token": "[PAD]".'
    )
    padded = byte_tokenizer(tmp_path / "padded", pad_token="<|pad|>")
    with pytest.raises(ModelError) as error:
        frame_of(padded, "padded", Task.MASKED_LM)
    assert str(error.value) == (
        "The tokenizer in padded has no mask token, which stands for a token that is to be predicted. Name one of its tokens "
        'in its tokenizer_config.json, as "mask_token": "[MASK]".'
    )
    with pytest.raises(ConfigError) as fault:
        frame_of(None, "bytes", Task.MASKED_LM)
    assert str(fault.value) == 'The task "masked-lm" needs a tokenizer, and `data.tokenizer` is "bytes". Give the folder of one.'
