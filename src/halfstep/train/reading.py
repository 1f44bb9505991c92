"""Rows of files become documents, which are kept on disk; some of them are held out."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.config.inputs import BYTES, Inputs
from halfstep.config.options import DataFormat, DataKind, Task
from halfstep.errors import ConfigError, DataError
from halfstep.train.cache import kept_documents, key_of
from halfstep.train.chat import Chats, Completions, Sample
from halfstep.train.classes import check_label, label_of
from halfstep.train.documents import Documents
from halfstep.train.order import shuffled
from halfstep.train.tables import Row, rows_of


def columns_of(files: Sequence[str], how: DataFormat) -> Sequence[str]:
    """The columns of the first row.

    Raises:
        DataError: there is none.
    """
    first = next(rows_of(paths_of(files, key="data.files"), how))
    return tuple(first.values)


def paths_of(patterns: Sequence[str], *, key: str) -> list[Path]:
    """The files, or folders of datasets, that the paths and patterns name, each once, in the order of the patterns.

    Args:
        patterns: paths, or patterns with `*`, `?`, `[...]` and `**`.
        key: the setting that they come from, for messages.

    Raises:
        DataError: a path does not exist, or a pattern matches nothing.
    """
    paths: dict[Path, Path] = {}
    for pattern in patterns:
        matched = sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]
        if not matched:
            raise DataError(f'`{key}`: no file matches "{pattern}".')
        for path in map(Path, matched):
            if not path.exists():
                raise DataError(f"`{key}`: {path} does not exist.")
            paths.setdefault(path.resolve(), path)
    return list(paths.values())


def read_documents(
    paths: Sequence[Path], inputs: Inputs, tokenizer: Any | None, classes: Sequence[str] | None = None
) -> Documents:
    """The rows of the files as documents: those that were kept of the same files, or new ones.

    Args:
        paths: of the files.
        inputs: what their rows are.
        tokenizer: of transformers; `None` where tokens are bytes.
        classes: what a label can be; `None` where it can be anything.

    Raises:
        UsageError: a file, a row or the tokenizer does not fit; the message names the place.
    """
    settings = {"format": inputs.format, "kind": inputs.kind, "columns": inputs.columns, "classes": classes, "task": inputs.task}
    maker = _Maker(inputs, tokenizer, classes)
    documents, _ = kept_documents(key_of(paths, tokenizer, settings), lambda: maker.samples(paths))
    return documents


def hold_out(documents: Documents, share: float) -> tuple[Documents, Documents, str]:
    """The documents to train on, those held out, and how they were chosen: at random, and the same ones every time."""
    number = min(round(share * len(documents)), len(documents) - 1)
    chosen = np.zeros(len(documents), dtype=np.bool_)
    chosen[shuffled(len(documents), seed=0, epoch=0)[:number]] = True
    return documents.chosen(~chosen), documents.chosen(chosen), f"{number:,} of {len(documents):,} documents"


def predicted_bytes(documents: Documents, tokenizer: Any | None) -> int:
    """Bytes of the text that is predicted in the documents."""
    total = 0
    for start, length in zip(documents.starts, documents.lengths, strict=True):
        span = slice(start + 1, start + length)
        tokens = documents.tokens[span][documents.counted[span]].tolist()
        total += len(tokens) if tokenizer is None else len(tokenizer.decode(tokens).encode())
    return total


class _Maker:
    """Makes samples of rows."""

    def __init__(self, inputs: Inputs, tokenizer: Any | None, classes: Sequence[str] | None) -> None:
        assert inputs.kind is not None
        assert inputs.columns is not None
        assert inputs.tokenizer is not None
        self._classes, self._ends = classes, inputs.task is Task.CAUSAL_LM
        if tokenizer is None and inputs.kind not in (DataKind.TEXT, DataKind.LABEL):
            raise ConfigError(
                f'`data.kind = "{inputs.kind}"` needs a tokenizer, and `data.tokenizer` is "{BYTES}". Give its folder.'
            )
        self._format, self._kind, self._columns, self._tokenizer = inputs.format, inputs.kind, inputs.columns, tokenizer
        self._chats = Chats(tokenizer, inputs.tokenizer) if self._kind is DataKind.CHAT else None
        self._completions = Completions(tokenizer, inputs.tokenizer) if self._kind is DataKind.COMPLETION else None

    def samples(self, paths: Sequence[Path]) -> Iterator[Sample]:
        """A sample for each row of the files."""
        assert self._format is not None
        return map(self._sample, rows_of(paths, self._format))

    def _sample(self, row: Row) -> Sample:
        if self._chats is not None:
            return self._chats.sample(row.column(self._columns[0]), row.where)
        if self._completions is not None:
            prompt, completion = (row.column(name) for name in self._columns)
            return self._completions.sample(prompt, completion, row.where)
        text = self._of_text(row.text(self._columns[0]))
        if self._kind is not DataKind.LABEL:
            return text
        label = label_of(row.column(self._columns[1]), row.where, self._columns[1])
        check_label(label, self._classes, row.where)
        return replace(text, label=label)

    def _of_text(self, text: str) -> Sample:
        if self._tokenizer is None:
            tokens = list(text.encode())
        else:
            end = self._tokenizer.eos_token_id if self._ends else None
            tokens = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            tokens = tokens if end is None else [*tokens, end]
        return Sample(tokens=tokens, counted=[True] * len(tokens))
