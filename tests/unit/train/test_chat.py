"""Of a chat only what the assistant says is predicted; whatever else a file may hold is answered in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from halfstep.errors import DataError, ModelError
from halfstep.train.chat import Chats, Completions, Sample

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] if loop.last else '...') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('The first turn must be the user.') }}{% endif %}" + PLAIN
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hé?"},
    {"role": "assistant", "content": "Jà!"},
    {"role": "user", "content": "1 + 1"},
    {"role": "assistant", "content": "2"},
]
WHERE = "chats.jsonl, line 7"


def tokenizer(template: str | None = PLAIN) -> Any:
    """Bytes and three special tokens; a letter with an accent is two tokens."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = template
    return fast


def answers(sample: Sample, of: Any) -> str:
    assert len(sample.tokens) == len(sample.counted)
    chosen = [token for token, counted in zip(sample.tokens, sample.counted, strict=True) if counted]
    text: str = of.decode(chosen)
    return text


def fault(messages: object, template: str = PLAIN) -> str:
    with pytest.raises(DataError) as error:
        Chats(tokenizer(template), "model").sample(messages, WHERE)
    return str(error.value)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_only_what_the_assistant_says_counts_with_the_end_of_its_turn(template: str) -> None:
    made = tokenizer(template)
    sample = Chats(made, "model").sample(CHAT, WHERE)
    assert sample.tokens == made.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert answers(sample, made) == "Jà!<|im_end|>\n2<|im_end|>\n"


@given(st.lists(st.tuples(st.text(max_size=8), st.text(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_prefixes_find_what_the_template_would_mark(turns: list[tuple[str, str]]) -> None:
    chat = [
        {"role": role, "content": content} for pair in turns for role, content in zip(("user", "assistant"), pair, strict=True)
    ]
    plain, marked = (Chats(tokenizer(template), "model").sample(chat, WHERE) for template in (PLAIN, MARKED))
    assert plain == marked


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    assert fault(CHAT, FORGETFUL) == (
        f"{WHERE}: the chat template of model writes turn 3 of this chat otherwise when more follows, so the assistant's "
        "words cannot be told from the rest. Mark them in the template with {% generation %}."
    )


def test_what_a_template_says_about_a_chat_is_passed_on() -> None:
    assert fault(CHAT, STRICT) == f"{WHERE}: the chat template of model refuses the chat: The first turn must be the user."


def test_a_chat_without_an_assistant_is_named() -> None:
    cause = "the chat has no assistant turn, so there is nothing to learn from it"
    assert fault(CHAT[:2]) == f"{WHERE}: {cause} (its roles: system, user)."
    assert fault([]) == f"{WHERE}: {cause} (its roles: none)."


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ("hello", "a chat is a list of turns, and this is a text."),
        (None, "a chat is a list of turns, and this is nothing."),
        ([{"from": "human", "value": "x"}], "turn 1 of the chat must have `role` and `content`, and it has `from`, `value`."),
        ([CHAT[0], 3], "turn 2 of the chat must have `role` and `content`, and it is a number."),
        ([{"role": "assistant", "content": ""}], "turn 1 of the chat is the assistant's, and it is empty."),
        ([{"role": "user", "content": 5}], "the content of turn 1 of the chat is a number; it must be a text."),
    ],
)
def test_what_is_no_chat_is_answered_in_a_sentence(messages: object, told: str) -> None:
    assert fault(messages) == f"{WHERE}: {told}"


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    with pytest.raises(ModelError) as error:
        Chats(tokenizer(None), "model")
    assert str(error.value) == (
        "The tokenizer in model has no chat template. Use one that has, or data with a prompt and a completion."
    )


def test_of_a_prompt_and_its_completion_the_completion_and_the_end_count() -> None:
    made = tokenizer()
    sample = Completions(made, "model").sample("Héllo ", "wörld", WHERE)
    assert made.decode(sample.tokens) == "Héllo wörld<|end|>"
    assert answers(sample, made) == "wörld<|end|>"


@pytest.mark.parametrize(
    ("prompt", "completion", "told"),
    [
        (None, "x", "the prompt is nothing; it must be a text."),
        ("x", 4.5, "the completion is a number; it must be a text."),
        ("x", " \n", "the completion is empty."),
    ],
)
def test_a_prompt_or_completion_that_is_none_is_named(prompt: object, completion: object, told: str) -> None:
    with pytest.raises(DataError) as error:
        Completions(tokenizer(), "model").sample(prompt, completion, WHERE)
    assert str(error.value) == f"{WHERE}: {told}"


def test_a_tokenizer_that_does_not_know_its_places_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ModelError) as error:
        Completions(Slow(), "model")
    assert str(error.value) == (
        "The tokenizer in model does not say which characters its tokens stand for, so answers cannot be told from prompts. "
        "Use one with a tokenizer.json."
    )
