"""The first step of resolving: what has to be opened before the rest can be decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.config.choice import Choice
from halfstep.config.decisions import Decisions, is_auto
from halfstep.config.options import Corpus, DataFormat, DataKind, Task
from halfstep.config.rows import ColumnsOf, no_columns, resolve_rows
from halfstep.config.schema import Written
from halfstep.config.tasks import TaskOf, asked_classes, language_model, resolve_task
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
        task: what the model learns.
        path: the folder that the model is loaded from; `None` where it is built.
        architecture: the architecture that it is built from; `None` where it is loaded, or the user's own.
        factory: what makes the user's own model; `None` where transformers does.
        config: the keys that differ from the architecture's own defaults, or the factory's arguments; `None` where it is loaded.
        loss: the user's own loss; `None` for that of the task.
        corpus: the embedded corpus, or `None` where there are files.
        files: paths or patterns of files.
        data_factory: what makes the user's own data.
        data_config: its arguments.
        format: how the files are written; `None` for the user's own data.
        kind: what their rows are; `None` for text files, which have none.
        columns: the columns that are used; `None` for text files.
        classes: the classes that are asked for; `None` where the data say.
        image_size: the pixels along a side that are asked for; `None` where the model says.
        tokenizer: "bytes" or a folder; `None` where nothing becomes tokens.
        evaluation_files: paths or patterns of held-out text; `None`: a share of the text.
        choices: why.
    """

    task: Task
    path: str | None
    architecture: str | None
    factory: str | None
    config: Mapping[str, Any] | None
    loss: str | None
    corpus: Corpus | None
    files: tuple[str, ...] | None
    data_factory: str | None
    data_config: Mapping[str, Any] | None
    format: DataFormat | None
    kind: DataKind | None
    columns: tuple[str, ...] | None
    classes: tuple[str, ...] | None
    image_size: int | None
    tokenizer: str | None
    evaluation_files: tuple[str, ...] | None
    choices: Mapping[str, Choice[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizers:
    """How to learn about tokenizers, and models, in folders, asked only where the answer is needed.

    Attributes:
        exists: whether a folder holds one.
        size: how many tokens that of a folder knows.
        task: what a model usually learns.
    """

    exists: Callable[[str], bool]
    size: Callable[[str], int]
    task: TaskOf = language_model


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
    path, factory = written.model.path, written.model.factory
    task = resolve_task(written, tokenizers.task, decisions)
    tokens = task is not Task.IMAGE_CLASSIFICATION and written.data.factory is None
    tokenizer = None if not tokens else _asked_tokenizer(written, tokenizers, decisions)
    rows = resolve_rows(written.data, task, columns_of, decisions)
    image_size = None if is_auto(written.data.image_size) else written.data.image_size
    assert not isinstance(image_size, str)
    return Inputs(
        task=task,
        path=path,
        architecture=None if path is not None or factory is not None else _architecture(written, decisions),
        factory=factory,
        config=None if path is not None else _config(written, tokenizer, tokenizers, decisions),
        loss=written.model.loss,
        corpus=_corpus(written, decisions) if tokens and written.data.files is None else None,
        files=_tuple(written.data.files),
        data_factory=written.data.factory,
        data_config=written.data.config,
        format=rows.format,
        kind=rows.kind,
        columns=rows.columns,
        classes=asked_classes(written),
        image_size=image_size,
        tokenizer=tokenizer,
        evaluation_files=_tuple(written.evaluation.files),
        choices=decisions.choices,
    )


def _tuple(paths: list[str] | None) -> tuple[str, ...] | None:
    return None if paths is None else tuple(paths)


def _refuse_contradictions(written: Written) -> None:
    model, data, evaluation = written.model, written.data, written.evaluation
    if model.factory is not None and (model.path is not None or model.architecture is not None):
        raise ConfigError("`model.factory` makes the model: leave `model.path` and `model.architecture` out.")
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


def _config(written: Written, tokenizer: str | None, tokenizers: Tokenizers, decisions: Decisions) -> Mapping[str, Any]:
    """The keys of the architecture, with the vocabulary of the tokenizer where none was given."""
    asked = written.model
    if asked.factory is not None:
        return decisions.default("model.config", asked.config, {}, "the factory's own defaults")
    given_one = asked.architecture is not None
    keys = decisions.default(
        "model.config",
        asked.config,
        {} if given_one else DEFAULT_MODEL,
        "the architecture's own defaults" if given_one else NO_MODEL,
    )
    if "vocab_size" in keys or tokenizer is None:
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


def _asked_tokenizer(written: Written, tokenizers: Tokenizers, decisions: Decisions) -> str:
    path = written.model.path
    return decisions.take("data.tokenizer", written.data.tokenizer, lambda: _tokenizer(path, tokenizers))


def _tokenizer(path: str | None, tokenizers: Tokenizers) -> Choice[str]:
    if path is None:
        return Choice(value=BYTES, reason="a model built from its architecture has no tokenizer; a token is a byte")
    if tokenizers.exists(path):
        return Choice(value=path, reason="the model folder's own")
    return Choice(value=BYTES, reason="the model folder holds no tokenizer; a token is a byte")
