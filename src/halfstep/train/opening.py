"""Opens what a configuration names (model configuration, tokenizer, text) and learns what resolving must know."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from typing import Any

import torch

from halfstep.config.decisions import is_auto
from halfstep.config.facts import Facts, MachineFacts, ModelFacts
from halfstep.config.inputs import BYTES, Inputs, Tokenizers, resolve_inputs
from halfstep.config.options import Task
from halfstep.config.schema import Written
from halfstep.distributed import Group, local_device, world
from halfstep.errors import DataError, DeviceError, ModelError
from halfstep.measure.memory import total_bytes
from halfstep.train.classes import set_classes
from halfstep.train.models import (
    SPECIAL_TOKENS,
    config_of_architecture,
    config_of_folder,
    has_tokenizer,
    load_tokenizer,
    model_facts,
    usual_task,
)
from halfstep.train.own import facts_of_own, own_model
from halfstep.train.reading import columns_of
from halfstep.train.samples import Source
from halfstep.train.sources import OpenedData, open_data


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What was opened.

    Attributes:
        inputs: what was asked for.
        model_config: the transformers configuration of the model; `None` for one of the user's own.
        tokenizer: the tokenizer; `None` where tokens are bytes, or nothing becomes tokens.
        data: the data.
        model: size of the model.
    """

    inputs: Inputs
    model_config: Any | None
    tokenizer: Any | None
    data: OpenedData
    model: ModelFacts

    @property
    def train(self) -> Source:
        """What to train on."""
        return self.data.train

    @property
    def held_out(self) -> Source:
        """What is held out."""
        return self.data.held_out

    @property
    def kept_beside(self) -> Any | None:
        """What belongs in a folder with the model: a tokenizer or an image processor, where there is one."""
        return self.data.processor


def open_inputs(written: Written) -> Opened:
    """Open what the configuration names.

    Raises:
        UsageError: something is missing, empty, or does not fit.
    """
    tokenizer_in = cache(load_tokenizer)
    looks = Tokenizers(exists=has_tokenizer, size=lambda folder: len(tokenizer_in(folder)), task=usual_task)
    inputs = resolve_inputs(written, looks, columns_of)
    tokenizer = None if inputs.tokenizer in (None, BYTES) else tokenizer_in(inputs.tokenizer)
    config = None if inputs.factory is not None else _model_config(inputs, tokenizer)
    _check_vocabulary(inputs, tokenizer, config)
    data = open_data(inputs, written, tokenizer, config)
    if data.facts.samples is None and data.train.num_tokens < 2:
        raise DataError(f"The text to train on is {data.train.num_tokens} tokens long: it takes at least 2.")
    if data.facts.classes is not None and config is not None:
        set_classes(config, data.facts.classes.value)
    return Opened(
        inputs=inputs,
        model_config=config,
        tokenizer=tokenizer,
        data=data,
        model=_model_facts(inputs, config),
    )


def _model_facts(inputs: Inputs, config: Any | None) -> ModelFacts:
    """Of a model of the user's own they are counted on one that is made for it: where it may be made is not known."""
    if inputs.factory is not None:
        with torch.random.fork_rng(devices=[]):
            return facts_of_own(own_model(inputs.factory, inputs.config or {}))
    return model_facts(config, family_of(inputs))


def family_of(inputs: Inputs) -> Task:
    """The task whose models of transformers are meant: where loss and data are the user's own, that of such a model."""
    return usual_task(inputs.path, inputs.architecture).value if inputs.task is Task.OWN else inputs.task


def facts_of(opened: Opened, written: Written, device: torch.device, started: datetime) -> Facts:
    """All that resolving needs to know, for a run on `device`."""
    ranks = world().size if world().size > 1 or is_auto(written.processes) else int(written.processes or 1)
    return Facts(machine=_machine(device, ranks), model=opened.model, data=opened.data.facts, started=started)


def alike(facts: Facts, group: Group) -> Facts:
    """The facts as every rank decides by them: of the memory, what the rank that has least of it has."""
    memory = facts.machine.memory_bytes
    unknown, negative = group.max(float(memory is None), -float(memory or 0))
    return replace(facts, machine=replace(facts.machine, memory_bytes=None if unknown else int(-negative)))


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
    # An architecture's own special tokens are places in a vocabulary of its own: here they would be others, or none.
    special = {name: getattr(tokenizer, name, None) for name in SPECIAL_TOKENS} if inputs.tokenizer is not None else {}
    if inputs.path is None:
        assert inputs.architecture is not None
        return config_of_architecture(inputs.architecture, {**special, **(inputs.config or {})}, family_of(inputs))
    config = config_of_folder(inputs.path, family_of(inputs))
    if inputs.task is Task.SEQUENCE_CLASSIFICATION and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = special.get("pad_token_id")  # by which the models of LLaMA's kind find the last token of a text
    return config


def _check_vocabulary(inputs: Inputs, tokenizer: Any | None, config: Any | None) -> None:
    known = None if config is None else getattr(config.get_text_config(), "vocab_size", None)
    if inputs.tokenizer is None or known is None:
        return
    size = 256 if tokenizer is None else len(tokenizer)
    if size > known:
        whose = "Bytes are" if tokenizer is None else f"The tokenizer in {inputs.tokenizer} knows"
        raise ModelError(f"{whose} {size:,} tokens, and the model knows {known:,}. They do not fit.")


def _machine(device: torch.device, ranks: int) -> MachineFacts:
    return MachineFacts(
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or device.type,
        cores=torch.get_num_threads(),
        memory_bytes=total_bytes(device),
        world_size=ranks,
        ranks_sharing_memory=1 if device.type != "cpu" else world().local_size if world().size > 1 else ranks,
    )
