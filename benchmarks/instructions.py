"""Instruction data of mixed lengths that every machine has: functions of Python's standard library and their docstrings.

`write` leaves a folder with a tokenizer of 4,096 tokens, trained on the text itself, and rows of prompt and completion.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from halfstep.train.corpus import read_stdlib

VOCABULARY = 4096
CONTEXT = 512
MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
}
Rows = list[dict[str, str]]


def rows(number: int) -> Rows:
    """So many prompts with their completions."""
    found: Rows = []
    for text in read_stdlib():
        found += _documented(text.content[:].tobytes())
        if len(found) >= number:
            return found[:number]
    raise ValueError(f"Python's standard library has only {len(found)} documented functions")


def _documented(source: bytes) -> Iterator[dict[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (told := ast.get_docstring(node)):
            arguments = f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else ""
            yield {"prompt": f"What is `{node.name}{arguments}`?\n", "completion": told}


def write_text(folder: Path, sequences: int, length: int) -> None:
    """Write `text.txt`, one stream of so many sequences where a byte is a token."""
    text = b"".join(text.content[:].tobytes() for text in read_stdlib())
    (folder / "text.txt").write_bytes(text[: sequences * (length - 1) + 1])


def write(folder: Path, number: int) -> None:
    """Write `rows.jsonl` and the tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    data = rows(number)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data), encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((row["prompt"] + row["completion"] for row in data), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>").save_pretrained(str(folder))
