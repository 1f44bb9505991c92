"""The first step of resolving: what has to be opened before the rest can be decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.config.choice import Choice
from halfstep.config.decisions import Decisions, is_auto
from halfstep.config.options import Corpus, DataFormat, DataKind
from halfstep.config.rows import ColumnsOf, no_columns, resolve_rows
from halfstep.config.schema import Written
from halfstep.errors import ConfigError

BYTES = "bytes"
"""The tokenizer that needs no files: a token is a byte."""

NO_MODEL = "no model was given: a small LLaMA that trains in minutes on two cores"
DEFAULT_MODEL: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
"""Small enough for a few minutes on two cores, wide enough that most of the work is matmuls, which BF16 speeds up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What has to be opened before the rest can be decided.

    Attributes:
        path: the folder that the model is loaded from; `None` where it is built.
        architecture: the architecture that it is built from; `None` where it is loaded.
        config: the keys that differ from the architecture's own defaults; `None` where it is loaded.
        corpus: the embedded corpus, or `None` where there are files.
        files: paths or patterns of files.
        format: how the files are written.
        kind: what their rows are; `None` for text files, which have none.
        columns: the columns that are used; `None` for text files.
        tokenizer: "bytes" or a folder.
        evaluation_files: paths or patterns of held-out text; `None`: a share of the text.
        choices: why.
    """

    path: str | None
    architecture: str | None
    config: Mapping[str, Any] | None
    corpus: Corpus | None
    files: tuple[str, ...] | None
    format: DataFormat
    kind: DataKind | None
    columns: tuple[str, ...] | None
    tokenizer: str
    evaluation_files: tuple[str, ...] | None
    choices: Mapping[str, Choice[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizers:
    """How to learn about tokenizers in folders, asked only where the answer is needed.

    Attributes:
        exists: whether a folder holds one.
        size: how many tokens that of a folder knows.
    """

    exists: Callable[[str], bool]
    size: Callable[[str], int]


def resolve_inputs(written: Written, tokenizers: Tokenizers, columns_of: ColumnsOf = no_columns) -> Inputs:
    """What to open.

    Args:
        written: the configuration.
        tokenizers: how to learn about tokenizers.
        columns_of: the columns of the first row in files of a format.

    Raises:
        ConfigError: two settings contradict each other.
    """
    decisions = Decisions()
    _refuse_contradictions(written)
    path = written.model.path
    architecture = None if path is not None else _architecture(written, decisions)
    tokenizer = decisions.take("data.tokenizer", written.data.tokenizer, lambda: _tokenizer(path, tokenizers))
    rows = resolve_rows(written.data, columns_of, decisions)
    return Inputs(
        path=path,
        architecture=architecture,
        config=None if path is not None else _config(written, tokenizer, tokenizers, decisions),
        corpus=None if written.data.files is not None else _corpus(written, decisions),
        files=_tuple(written.data.files),
        format=rows.format,
        kind=rows.kind,
        columns=rows.columns,
        tokenizer=tokenizer,
        evaluation_files=_tuple(written.evaluation.files),
        choices=decisions.choices,
    )


def _tuple(paths: list[str] | None) -> tuple[str, ...] | None:
    return None if paths is None else tuple(paths)


def _refuse_contradictions(written: Written) -> None:
    model, data, evaluation = written.model, written.data, written.evaluation
    if model.path is not None and (model.architecture is not None or model.config is not None):
        raise ConfigError(
            "`model.path` and `model.architecture` or `model.config` are both given: a model is loaded from a folder "
            "or built from its architecture. Leave one of them out."
        )
    if data.files is not None and not is_auto(data.corpus):
        raise ConfigError("`data.files` and `data.corpus` are both given. Leave one of them out.")
    if evaluation.files is not None and not is_auto(evaluation.share):
        raise ConfigError("`evaluation.files` and `evaluation.share` are both given. Leave one of them out.")


def _architecture(written: Written, decisions: Decisions) -> str:
    return decisions.default("model.architecture", written.model.architecture, "llama", NO_MODEL)


def _config(written: Written, tokenizer: str, tokenizers: Tokenizers, decisions: Decisions) -> Mapping[str, Any]:
    """The keys of the architecture, with the vocabulary of the tokenizer where none was given."""
    asked = written.model
    given_one = asked.architecture is not None
    keys = decisions.default(
        "model.config",
        asked.config,
        {} if given_one else DEFAULT_MODEL,
        "the architecture's own defaults" if given_one else NO_MODEL,
    )
    if "vocab_size" in keys:
        return keys
    size = 256 if tokenizer == BYTES else tokenizers.size(tokenizer)
    with_size = {**keys, "vocab_size": size}
    reason = decisions.choices["model.config"].reason
    why = f"vocab_size from the tokenizer; {reason}"
    decisions.choices["model.config"] = Choice(value=with_size, reason=why)
    return with_size


def _corpus(written: Written, decisions: Decisions) -> Corpus:
    reason = "no files were given: the source text of Python's standard library, which is on every machine"
    return decisions.default("data.corpus", written.data.corpus, Corpus.PYTHON_STDLIB, reason)


def _tokenizer(path: str | None, tokenizers: Tokenizers) -> Choice[str]:
    if path is None:
        return Choice(value=BYTES, reason="a model built from its architecture has no tokenizer; a token is a byte")
    if tokenizers.exists(path):
        return Choice(value=path, reason="the model folder's own")
    return Choice(value=BYTES, reason="the model folder holds no tokenizer; a token is a byte")
