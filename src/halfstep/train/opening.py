"""Opens what a configuration names (model configuration, tokenizer, text) and learns what resolving must know."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

from halfstep.config.decisions import is_auto
from halfstep.config.facts import DataFacts, Facts, MachineFacts, ModelFacts
from halfstep.config.inputs import BYTES, Inputs, Tokenizers, resolve_inputs
from halfstep.config.resolve import held_out_share
from halfstep.config.schema import Written
from halfstep.distributed import local_device, world
from halfstep.errors import DataError, DeviceError, ModelError
from halfstep.measure.memory import total_bytes
from halfstep.train.corpus import (
    Split,
    Text,
    Tokens,
    byte_tokens,
    read_files,
    read_stdlib,
    split,
    split_off,
    tokens_of,
    unigram_entropy,
)
from halfstep.train.models import config_of_architecture, config_of_folder, has_tokenizer, load_tokenizer, model_facts
from halfstep.train.reading import columns_of, hold_out, paths_of, predicted_bytes, read_documents
from halfstep.train.samples import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What was opened.

    Attributes:
        inputs: what was asked for.
        model_config: the transformers configuration of the model.
        tokenizer: the tokenizer; `None` where tokens are bytes.
        train: what to train on.
        held_out: what is held out.
        unigram_nats_per_byte: entropy of the held-out text's bytes; `None` where nothing is held out, or documents are.
        model: size of the model.
        data: size of the text.
    """

    inputs: Inputs
    model_config: Any
    tokenizer: Any | None
    train: Source
    held_out: Source
    unigram_nats_per_byte: float | None
    model: ModelFacts
    data: DataFacts


def open_inputs(written: Written) -> Opened:
    """Open what the configuration names.

    Raises:
        UsageError: something is missing, empty, or does not fit.
    """
    tokenizer_in = cache(load_tokenizer)
    looks = Tokenizers(exists=has_tokenizer, size=lambda folder: len(tokenizer_in(folder)))
    inputs = resolve_inputs(written, looks, columns_of)
    tokenizer = None if inputs.tokenizer == BYTES else tokenizer_in(inputs.tokenizer)
    model_config = _model_config(inputs, tokenizer)
    model = model_facts(model_config)
    _check_vocabulary(inputs, tokenizer, model)
    open_data = _open_stream if inputs.kind is None else _open_documents
    train, held_out, entropy, data = open_data(inputs, written, tokenizer)
    if train.num_tokens < 2:
        raise DataError(f"The text to train on is {train.num_tokens} tokens long: it takes at least 2.")
    return Opened(
        inputs=inputs,
        model_config=model_config,
        tokenizer=tokenizer,
        train=train,
        held_out=held_out,
        unigram_nats_per_byte=entropy,
        model=model,
        data=data,
    )


OpenedData = tuple[Source, Source, float | None, DataFacts]
"""What to train on, what is held out, the entropy of its bytes, and how much of it there is."""


def _open_stream(inputs: Inputs, written: Written, tokenizer: Any | None) -> OpenedData:
    divided, text_bytes = _divide(inputs, written)
    train, held_out = (_tokens(texts, tokenizer) for texts in (divided.train, divided.held_out))
    data = DataFacts(
        text_bytes=text_bytes,
        train_tokens=len(train),
        train_files=len(divided.train),
        evaluation_tokens=len(held_out),
        evaluation_bytes=sum(len(text.content) for text in divided.held_out),
        held_out=divided.how,
    )
    return Source(train), Source(held_out), unigram_entropy(divided.held_out), data


def _open_documents(inputs: Inputs, written: Written, tokenizer: Any | None) -> OpenedData:
    paths = paths_of(inputs.files or (), key="data.files")
    documents = read_documents(paths, inputs, tokenizer)
    text_bytes = sum(file.stat().st_size for path in paths for file in _files_of(path))
    if inputs.evaluation_files is None:
        train, held_out, how = hold_out(documents, held_out_share(written.evaluation, text_bytes).value)
    else:
        held_out = read_documents(paths_of(inputs.evaluation_files, key="evaluation.files"), inputs, tokenizer)
        train, how = documents, f"{len(held_out):,} documents of `evaluation.files`"
    source = Source(train)
    data = DataFacts(
        text_bytes=text_bytes,
        train_tokens=train.num_tokens,
        train_files=len(paths),
        evaluation_tokens=held_out.num_tokens,
        evaluation_bytes=predicted_bytes(held_out, tokenizer),
        held_out=how,
        longest=int(train.lengths.max(initial=1)),
        cut=source.cut,
    )
    return source, Source(held_out), None, data


def _files_of(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def facts_of(opened: Opened, written: Written, device: torch.device, started: datetime) -> Facts:
    """All that resolving needs to know, for a run on `device`."""
    ranks = world().size if world().size > 1 or is_auto(written.processes) else int(written.processes or 1)
    return Facts(machine=_machine(device, ranks), model=opened.model, data=opened.data, started=started)


def device_of(written: Written) -> torch.device:
    """The device of this rank: the one that was asked for, else the one that torch finds.

    Raises:
        DeviceError: there is no such device here.
    """
    asked = written.device
    if asked is None or asked == "auto":
        return local_device()
    found = local_device()
    if world().size > 1 and ":" in asked:
        raise DeviceError(f'`device = "{asked}"` is one device, for {world().size} ranks. Leave its number out.')
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise DeviceError(f'`device = "{asked}"` is not a device of torch. This machine has "{found.type}".') from None
    if device.type not in ("cpu", found.type):
        raise DeviceError(f'`device = "{asked}"` is not on this machine, which has "{found.type}".')
    if device.type != "cpu" and ":" not in asked:
        return found
    if device.type not in ("cpu", "mps") and (device.index or 0) >= torch.accelerator.device_count():
        count = torch.accelerator.device_count()
        raise DeviceError(f'`device = "{asked}"` is not on this machine, which has {count} of them, numbered from 0.')
    return device


def _model_config(inputs: Inputs, tokenizer: Any | None) -> Any:
    if inputs.path is not None:
        return config_of_folder(inputs.path)
    assert inputs.architecture is not None
    assert inputs.config is not None
    # The architecture's own special tokens are places in a vocabulary of its own: here they would be others, or none.
    special = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return config_of_architecture(inputs.architecture, {**special, **inputs.config})


def _check_vocabulary(inputs: Inputs, tokenizer: Any | None, model: ModelFacts) -> None:
    size = 256 if tokenizer is None else len(tokenizer)
    if size > model.vocabulary:
        whose = "Bytes are" if tokenizer is None else f"The tokenizer in {inputs.tokenizer} knows"
        raise ModelError(f"{whose} {size:,} tokens, and the model knows {model.vocabulary:,}. They do not fit.")


def _divide(inputs: Inputs, written: Written) -> tuple[Split, int]:
    texts = read_stdlib() if inputs.files is None else read_files(inputs.files, key="data.files")
    text_bytes = _size(texts)
    if inputs.evaluation_files is not None:
        return split_off(texts, read_files(inputs.evaluation_files, key="evaluation.files")), text_bytes
    return split(texts, held_out_share(written.evaluation, text_bytes).value), text_bytes


def _size(texts: list[Text]) -> int:
    return sum(len(text.content) for text in texts)


def _tokens(texts: tuple[Text, ...], tokenizer: Any | None) -> Tokens:
    if tokenizer is None:
        return byte_tokens(texts)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    return tokens_of(texts, encode, tokenizer.eos_token_id)


def _machine(device: torch.device, ranks: int) -> MachineFacts:
    return MachineFacts(
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or device.type,
        cores=torch.get_num_threads(),
        memory_bytes=total_bytes(device),
        world_size=ranks,
    )
