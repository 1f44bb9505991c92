"""Opens the data that a configuration names: a text, rows, pictures, or the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.config.choice import Choice
from halfstep.config.facts import DataFacts
from halfstep.config.inputs import BYTES, Inputs
from halfstep.config.options import DataFormat, Task
from halfstep.config.resolve import held_out_share
from halfstep.config.schema import Written
from halfstep.errors import DataError
from halfstep.train.cache import kept_documents, key_of
from halfstep.train.classes import check_label, classes_of_model, decide_classes
from halfstep.train.corpus import (
    PIECE_BYTES,
    Split,
    Text,
    byte_tokens,
    read_files,
    read_stdlib,
    samples_of,
    split,
    split_off,
    unigram_entropy,
)
from halfstep.train.documents import Documents, Ints
from halfstep.train.framed import Frame, frame_of, with_classes
from halfstep.train.order import shuffled
from halfstep.train.own import own_data
from halfstep.train.pictures import Pictures, Shelf, image_processor, mode_of, picture_folder, picture_rows
from halfstep.train.reading import hold_out, paths_of, predicted_bytes, read_documents
from halfstep.train.samples import Content, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedData:
    """Data that were opened.

    Attributes:
        train: what to train on.
        held_out: what is held out.
        facts: how much of it there is.
        unigram_nats_per_byte: entropy of the held-out text's bytes; `None` where there is no text, or documents are.
        processor: what made numbers of it, to be kept with the model: a tokenizer or an image processor, or `None`.
    """

    train: Source
    held_out: Source
    facts: DataFacts
    unigram_nats_per_byte: float | None = None
    processor: Any | None = None


def open_data(inputs: Inputs, written: Written, tokenizer: Any | None, config: Any | None) -> OpenedData:
    """Open the data.

    Args:
        inputs: what they are.
        written: the configuration.
        tokenizer: of transformers; `None` where tokens are bytes, or nothing becomes tokens.
        config: of the model; `None` for a model of the user's own.

    Raises:
        UsageError: something is missing, empty, or does not fit.
    """
    if inputs.data_factory is not None:
        return _open_own(inputs, written)
    if inputs.task is Task.IMAGE_CLASSIFICATION:
        return _open_pictures(inputs, written, config)
    frame = None
    if inputs.task is not Task.CAUSAL_LM:
        frame = frame_of(tokenizer, inputs.tokenizer or BYTES, inputs.task)
    if inputs.kind is None:
        return _open_stream(inputs, written, tokenizer, frame)
    return _open_rows(inputs, written, tokenizer, frame, config)


def _open_own(inputs: Inputs, written: Written) -> OpenedData:
    assert inputs.data_factory is not None
    share = held_out_share(written.evaluation, None).value
    train, held_out, how = own_data(inputs.data_factory, inputs.data_config or {}, share)
    facts = _sample_facts(len(train), len(held_out), how)
    if inputs.classes is not None:
        facts = replace(facts, classes=decide_classes(inputs.classes, None, inputs.classes))
    return OpenedData(train=Source(train), held_out=Source(held_out), facts=facts)


def _sample_facts(train: int, held_out: int, how: str) -> DataFacts:
    return DataFacts(
        text_bytes=None,
        train_tokens=train,
        train_files=train,
        evaluation_tokens=held_out,
        evaluation_bytes=None,
        held_out=how,
        samples=train,
    )


def _open_pictures(inputs: Inputs, written: Written, config: Any | None) -> OpenedData:
    shelf = _shelf(inputs, inputs.files or (), "data.files")
    classes = decide_classes(shelf.labels, classes_of_model(config), inputs.classes)
    numbers = _numbers(shelf, classes.value)
    processor, size = image_processor(inputs.path, config, inputs.image_size)
    mode = mode_of(config)
    if inputs.evaluation_files is None:
        share = held_out_share(written.evaluation, None).value
        order, num_held_out = shuffled(len(shelf), seed=0, epoch=0), min(round(share * len(shelf)), len(shelf) - 1)
        train = Pictures(shelf, numbers, np.sort(order[num_held_out:]), processor, mode)
        held_out = Pictures(shelf, numbers, np.sort(order[:num_held_out]), processor, mode)
        how = f"{num_held_out:,} of {len(shelf):,} pictures"
    else:
        other = _shelf(inputs, inputs.evaluation_files, "evaluation.files")
        train = Pictures(shelf, numbers, np.arange(len(shelf)), processor, mode)
        held_out = Pictures(other, _numbers(other, classes.value), np.arange(len(other)), processor, mode)
        how = f"{len(other):,} pictures of `evaluation.files`"
    facts = replace(_sample_facts(len(train), len(held_out), how), classes=classes, image_size=size)
    return OpenedData(train=Source(train), held_out=Source(held_out), facts=facts, processor=processor)


def _shelf(inputs: Inputs, patterns: Sequence[str], key: str) -> Shelf:
    folders = paths_of(patterns, key=key)
    if len(folders) != 1:
        raise DataError(f"`{key}` names {len(folders)} folders of pictures: it takes one, with a folder for each class in it.")
    if inputs.format is DataFormat.IMAGES:
        return picture_folder(folders[0])
    return picture_rows(folders[0], inputs.columns or ())


def _numbers(shelf: Shelf, classes: Sequence[str]) -> Ints:
    for label, name in zip(shelf.labels, shelf.names, strict=True):
        check_label(label, classes, name)
    places = {name: place for place, name in enumerate(classes)}
    return np.array([places[label] for label in shelf.labels], dtype=np.int64)


def _open_stream(inputs: Inputs, written: Written, tokenizer: Any | None, frame: Frame | None) -> OpenedData:
    divided, text_bytes = _divide(inputs, written)
    contents: list[Content] = [_content(texts, tokenizer, frame) for texts in (divided.train, divided.held_out)]
    train, held_out = (Source(content, frame) for content in contents)
    facts = DataFacts(
        text_bytes=text_bytes,
        train_tokens=train.num_tokens,
        train_files=len(divided.train),
        evaluation_tokens=held_out.num_tokens,
        evaluation_bytes=sum(len(text.content) for text in divided.held_out) if frame is None else None,
        held_out=divided.how,
        cut=None if frame is None else train.cut,
    )
    return OpenedData(
        train=train,
        held_out=held_out,
        facts=facts,
        unigram_nats_per_byte=unigram_entropy(divided.held_out) if frame is None else None,
        processor=tokenizer,
    )


def _content(texts: tuple[Text, ...], tokenizer: Any | None, frame: Frame | None) -> Content:
    """The texts as one stream, or, between special tokens, as documents."""
    if tokenizer is None:
        return byte_tokens(texts)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    end = tokenizer.eos_token_id if frame is None else None
    key = key_of([text.content[:] for text in texts], tokenizer, {"end": end, "piece": PIECE_BYTES})
    documents, _ = kept_documents(key, lambda: samples_of(texts, encode, end))
    return documents.tokens if frame is None else documents


def _open_rows(inputs: Inputs, written: Written, tokenizer: Any | None, frame: Frame | None, config: Any | None) -> OpenedData:
    paths = paths_of(inputs.files or (), key="data.files")
    documents = read_documents(paths, inputs, tokenizer, inputs.classes)
    classes = None
    if inputs.task.has_classes:
        classes = decide_classes(documents.label_names, classes_of_model(config), inputs.classes)
        documents = with_classes(documents, classes.value)
    text_bytes = None if classes is not None else sum(file.stat().st_size for path in paths for file in _files_of(path))
    if inputs.evaluation_files is None:
        train, held_out, how = hold_out(documents, held_out_share(written.evaluation, text_bytes).value)
    else:
        held_out = _evaluation_rows(inputs, tokenizer, classes)
        train, how = documents, f"{len(held_out):,} documents of `evaluation.files`"
    source = Source(train, frame)
    facts = DataFacts(
        text_bytes=text_bytes,
        train_tokens=train.num_tokens,
        train_files=len(paths),
        evaluation_tokens=held_out.num_tokens,
        evaluation_bytes=predicted_bytes(held_out, tokenizer) if frame is None else None,
        held_out=how,
        longest=int(train.lengths.max(initial=1)) + (0 if frame is None else frame.tokens),
        classes=classes,
        cut=source.cut,
    )
    return OpenedData(train=source, held_out=Source(held_out, frame), facts=facts, processor=tokenizer)


def _evaluation_rows(inputs: Inputs, tokenizer: Any | None, classes: Choice[tuple[str, ...]] | None) -> Documents:
    names = None if classes is None else classes.value
    paths = paths_of(inputs.evaluation_files or (), key="evaluation.files")
    documents = read_documents(paths, inputs, tokenizer, names)
    return documents if names is None else with_classes(documents, names)


def _files_of(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def _divide(inputs: Inputs, written: Written) -> tuple[Split, int]:
    texts = read_stdlib() if inputs.files is None else read_files(inputs.files, key="data.files")
    text_bytes = _size(texts)
    if inputs.evaluation_files is not None:
        return split_off(texts, read_files(inputs.evaluation_files, key="evaluation.files")), text_bytes
    return split(texts, held_out_share(written.evaluation, text_bytes).value), text_bytes


def _size(texts: list[Text]) -> int:
    return sum(len(text.content) for text in texts)
