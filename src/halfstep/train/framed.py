"""Texts between the special tokens of a tokenizer, filled up with its padding: for models that look both ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from halfstep.config.options import Task, TooLong
from halfstep.errors import ConfigError, ModelError
from halfstep.train.corpus import Tokens
from halfstep.train.documents import Documents, Fitted, Ints, fitted_of, shortened
from halfstep.train.loss import IGNORED
from halfstep.train.windows import Batch

MASKED_SHARE = 0.15
"""Of the tokens, those that are to be predicted (Devlin et al., arXiv 1810.04805, section 3.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What a tokenizer puts around a text.

    Attributes:
        before: special tokens before it.
        after: special tokens behind it.
        padding: the token that fills a row up.
        masks: hides tokens and says which; `None` where none are hidden.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    padding: int
    masks: Any | None = None

    @property
    def tokens(self) -> int:
        """How many tokens it is."""
        return len(self.before) + len(self.after)

    def around(self, tokens: Tokens) -> torch.Tensor:
        """A text with its special tokens."""
        return torch.from_numpy(np.concatenate([self.before, tokens, self.after]).astype(np.int64))


def frame_of(tokenizer: Any | None, name: str, task: Task) -> Frame:
    """What the tokenizer puts around a text, for a task that is no causal language model.

    Raises:
        UsageError: it has no pad token, or no mask token where the task needs one.
    """
    if tokenizer is None:
        raise ConfigError(f'The task "{task}" needs a tokenizer, and `data.tokenizer` is "{name}". Give the folder of one.')
    needed = {"pad": "with which texts are filled up to one length"}
    if task is Task.MASKED_LM:
        needed["mask"] = "which stands for a token that is to be predicted"
    for kind, purpose in needed.items():
        if getattr(tokenizer, f"{kind}_token_id") is None:
            raise ModelError(
                f"The tokenizer in {name} has no {kind} token, {purpose}. Name one of its tokens in its tokenizer_config.json, "
                f'as "{kind}_token": "[{kind.upper()}]".'
            )
    before, after = _specials(tokenizer)
    masks = _masks(tokenizer) if task is Task.MASKED_LM else None
    return Frame(before=before, after=after, padding=tokenizer.pad_token_id, masks=masks)


def _specials(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What stands before and behind a text, as the tokenizer itself writes it."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    start = next(place for place in range(len(whole)) if whole[place : place + len(bare)] == bare)
    return tuple(whole[:start]), tuple(whole[start + len(bare) :])


def _masks(tokenizer: Any) -> Any:
    from transformers import DataCollatorForLanguageModeling

    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASKED_SHARE)


def fit_framed(documents: Documents, length: int, how: TooLong, frame: Frame) -> Fitted:
    """The documents, none longer than `length` with its frame: cut, left out, or in pieces.

    Raises:
        UsageError: the frame alone is too long, or nothing is left.
    """
    room = length - frame.tokens
    if room < 1:
        raise ConfigError(f"`data.sequence_length = {length}` leaves no room between {frame.tokens} special tokens.")
    kept = shortened(documents, room, how)
    return fitted_of(documents, kept, room, how, len(kept))


class Framed(Dataset[Batch]):
    """One text a row: with its class where it has one, else with some of its tokens hidden.

    Which tokens are hidden follows from the number of the sample. Sample `i + n * len` is sample `i` with others hidden, so
    that every epoch can hide others, and every number of ranks the same ones.

    Args:
        documents: none longer than a sequence without its frame.
        frame: what stands around each.
    """

    def __init__(self, documents: Documents, frame: Frame) -> None:
        self.documents, self._frame = documents, frame

    def __len__(self) -> int:
        """The number of texts."""
        return len(self.documents)

    @property
    def lengths(self) -> Ints:
        """Tokens of each text, with its frame."""
        return self.documents.lengths + self._frame.tokens

    @property
    def num_predicted(self) -> int:
        """What is predicted in all of them: their classes, or about as many tokens as are hidden."""
        if self.documents.labels is not None:
            return len(self.documents)
        return max(1, round(MASKED_SHARE * self.documents.num_tokens))

    def __getitem__(self, index: int) -> Batch:
        """One text, as a batch of one."""
        return self.__getitems__([index])

    def __getitems__(self, numbers: Sequence[int]) -> Batch:
        """The texts as one batch: `input_ids`, `attention_mask`, and `labels`, of each text or of each token."""
        texts = [self._text(number % len(self)) for number in numbers]
        labels = self.documents.labels
        if labels is not None:
            of_texts = torch.from_numpy(labels[np.asarray(numbers) % len(self)].astype(np.int64))
            return {**self._filled(texts), "labels": of_texts}
        hidden = [self._hidden(text, number) for text, number in zip(texts, numbers, strict=True)]
        return {
            **self._filled([text for text, _ in hidden]),
            "labels": _rows([labels for _, labels in hidden], IGNORED),
        }

    def _text(self, index: int) -> torch.Tensor:
        start = self.documents.starts[index]
        return self._frame.around(self.documents.tokens[start : start + self.documents.lengths[index]])

    def _hidden(self, text: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A text with tokens hidden, and the labels that say which; it is done before filling up, which may differ."""
        masks, frame = self._frame.masks, self._frame
        special = torch.zeros(1, len(text), dtype=torch.bool)
        special[:, : len(frame.before)] = True
        special[:, len(text) - len(frame.after) :] = True
        masks.generator = torch.Generator().manual_seed(number)  # type: ignore[union-attr]  # there where no class is
        inputs, labels = masks.torch_mask_tokens(text[None], special_tokens_mask=special)  # type: ignore[union-attr]
        return inputs[0], labels[0]

    def _filled(self, texts: Sequence[torch.Tensor]) -> Batch:
        return {
            "input_ids": _rows(texts, self._frame.padding),
            "attention_mask": _rows([torch.ones_like(text) for text in texts], 0),
        }


def _rows(texts: Sequence[torch.Tensor], filling: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True, padding_value=filling)


def with_classes(documents: Documents, classes: Sequence[str]) -> Documents:
    """The documents with the numbers of these classes in place of those of their own labels."""
    numbers = {name: number for number, name in enumerate(classes)}
    assert documents.labels is not None
    order = np.array([numbers[name] for name in documents.label_names], dtype=np.int64)
    return replace(documents, labels=order[documents.labels], label_names=tuple(classes))
