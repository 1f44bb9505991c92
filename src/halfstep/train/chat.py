"""Instruction data: chats through the tokenizer's own template, prompts with their completions; answers alone count."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfstep.errors import DataError, ModelError

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Where a chat template marks what the assistant says."""
ASSISTANT = "assistant"

Span = tuple[int, int]
"""Where a part of a text begins and ends, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A document of instruction data.

    Attributes:
        tokens: all of it.
        counted: for each token whether it is to be predicted.
        label: the name of its class; `None` where it has none.
    """

    tokens: list[int]
    counted: list[bool]
    label: str | None = None


class Chats:
    """Turns chats into samples through the chat template of a tokenizer.

    Where the template marks the assistant's words (`{% generation %}`), the marks are taken. Else each answer is what a
    longer chat adds to the prompt for it; that the template builds chats up in this way is checked for every chat.

    Args:
        tokenizer: of transformers, with a chat template.
        name: what the tokenizer is called in messages.

    Raises:
        ModelError: the tokenizer has no chat template, or cannot say where its tokens are.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                f"The tokenizer in {name} has no chat template. Use one that has, or data with a prompt and a completion."
            )
        _require_offsets(tokenizer, name)
        self._tokenizer, self._name = tokenizer, name
        self.marked = bool(GENERATION_BLOCK.search(str(tokenizer.get_chat_template())))
        """Whether the template marks what the assistant says."""

    def sample(self, messages: object, where: str) -> Sample:
        """The chat as tokens, of which the assistant's count.

        Args:
            messages: a list of `{"role": ..., "content": ...}`.
            where: where the chat stands, for messages.

        Raises:
            DataError: the chat is none, has no assistant turn, or does not fit the template.
        """
        turns = _turns(messages, where)
        return self._by_marks(turns, where) if self.marked else self._by_prefixes(turns, where)

    def _by_marks(self, turns: Sequence[Mapping[str, Any]], where: str) -> Sample:
        encoded = self._apply(turns, where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        counted = [bool(flag) for flag in encoded["assistant_masks"]]
        if not any(counted):
            raise DataError(f"{where}: the chat template of {self._name} marks no token of the assistant in it.")
        return Sample(tokens=list(encoded["input_ids"]), counted=counted)

    def _by_prefixes(self, turns: Sequence[Mapping[str, Any]], where: str) -> Sample:
        whole: str = self._apply(turns, where, tokenize=False)
        answers = [index for index, turn in enumerate(turns) if turn["role"] == ASSISTANT]
        spans = [self._span(turns, index, whole, where) for index in answers]
        return _sample(self._tokenizer, whole, spans, special=False)

    def _span(self, turns: Sequence[Mapping[str, Any]], index: int, whole: str, where: str) -> Span:
        before: str = self._apply(turns[:index], where, tokenize=False, add_generation_prompt=True) if index else ""
        after: str = self._apply(turns[: index + 1], where, tokenize=False)
        if whole.startswith(before) and whole.startswith(after) and len(before) < len(after):
            return len(before), len(after)
        raise DataError(
            f"{where}: the chat template of {self._name} writes turn {index + 1} of this chat otherwise when more follows, so "
            "the assistant's words cannot be told from the rest. Mark them in the template with {% generation %}."
        )

    def _apply(self, turns: Sequence[Mapping[str, Any]], where: str, **how: Any) -> Any:
        from jinja2.exceptions import TemplateError

        try:
            return self._tokenizer.apply_chat_template(list(turns), **how)
        except TemplateError as error:
            raise DataError(f"{where}: the chat template of {self._name} refuses the chat: {error}") from None


class Completions:
    """Turns prompts and completions into samples of which the completion and the end of the text count.

    Args:
        tokenizer: of transformers.
        name: what the tokenizer is called in messages.

    Raises:
        ModelError: the tokenizer cannot say where its tokens are.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        _require_offsets(tokenizer, name)
        self._tokenizer = tokenizer

    def sample(self, prompt: object, completion: object, where: str) -> Sample:
        """The prompt and its completion as tokens, of which the completion's count.

        Raises:
            DataError: one of them is no text, or the completion is empty.
        """
        for word, value in (("prompt", prompt), ("completion", completion)):
            if not isinstance(value, str):
                raise DataError(f"{where}: the {word} is {_kind(value)}; it must be a text.")
        assert isinstance(prompt, str)
        assert isinstance(completion, str)
        if not completion.strip():
            raise DataError(f"{where}: the completion is empty.")
        found = _sample(self._tokenizer, prompt + completion, [(len(prompt), len(prompt + completion))], special=True)
        end = self._tokenizer.eos_token_id
        if end is None or found.tokens[-1] == end:
            return found
        return Sample(tokens=[*found.tokens, end], counted=[*found.counted, True])


def _sample(tokenizer: Any, text: str, spans: Sequence[Span], *, special: bool) -> Sample:
    """The text as tokens, of which those count that reach into a span; a token over an edge belongs to both sides."""
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    counted = [any(begin < high and low < end for low, high in spans) for begin, end in encoded["offset_mapping"]]
    return Sample(tokens=list(encoded["input_ids"]), counted=counted)


def _require_offsets(tokenizer: Any, name: str) -> None:
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"The tokenizer in {name} does not say which characters its tokens stand for, so answers cannot be told from "
            "prompts. Use one with a tokenizer.json."
        )


def _turns(messages: object, where: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise DataError(f"{where}: a chat is a list of turns, and this is {_kind(messages)}.")
    for number, turn in enumerate(messages, start=1):
        _check_turn(turn, number, where)
    if not any(turn["role"] == ASSISTANT for turn in messages):
        roles = ", ".join(dict.fromkeys(str(turn["role"]) for turn in messages)) or "none"
        raise DataError(f"{where}: the chat has no assistant turn, so there is nothing to learn from it (its roles: {roles}).")
    return messages


def _check_turn(turn: object, number: int, where: str) -> None:
    if not isinstance(turn, Mapping) or "role" not in turn:
        given = f"has {', '.join(f'`{key}`' for key in turn) or 'nothing'}" if isinstance(turn, Mapping) else f"is {_kind(turn)}"
        raise DataError(f"{where}: turn {number} of the chat must have `role` and `content`, and it {given}.")
    content = turn.get("content")
    if turn["role"] == ASSISTANT and not content and not turn.get("tool_calls"):
        raise DataError(f"{where}: turn {number} of the chat is the assistant's, and it is empty.")
    if content is not None and not isinstance(content, (str, list)):
        raise DataError(f"{where}: the content of turn {number} of the chat is {_kind(content)}; it must be a text.")


def _kind(value: object) -> str:
    """What a value from a file is, in words."""
    kinds: dict[type, str] = {type(None): "nothing", bool: "true or false", int: "a number", float: "a number"}
    kinds.update({str: "a text", list: "a list", dict: "a table"})
    return kinds.get(type(value), type(value).__name__)
