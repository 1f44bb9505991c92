"""Models of transformers for each task: from an architecture's name and keys, or from a local folder.

Nothing here asks a network: a model that is not on this machine is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.config.choice import Choice
from halfstep.config.facts import ModelFacts
from halfstep.config.options import Attention, Task
from halfstep.errors import ModelError
from halfstep.train.attention import name_of
from halfstep.train.weights import drawn, fill, give_memory

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The models of transformers for a task: what builds them, which there are, and what they are called."""

    auto: str
    mapping: str
    words: str


FAMILIES: Mapping[Task, Family] = {
    Task.MASKED_LM: Family(
        auto="AutoModelForMaskedLM", mapping="MODEL_FOR_MASKED_LM_MAPPING_NAMES", words="masked language model"
    ),
    Task.CAUSAL_LM: Family(
        auto="AutoModelForCausalLM", mapping="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", words="causal language model"
    ),
    Task.IMAGE_CLASSIFICATION: Family(
        auto="AutoModelForImageClassification",
        mapping="MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        words="classifier of images",
    ),
    Task.SEQUENCE_CLASSIFICATION: Family(
        auto="AutoModelForSequenceClassification",
        mapping="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        words="classifier of texts",
    ),
}
"""In the order in which an architecture's name is looked up: those that can be both learn by masks."""


def has_tokenizer(folder: str | None) -> bool:
    """Whether the folder holds a tokenizer."""
    return folder is not None and any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def usual_task(path: str | None, architecture: str | None) -> Choice[Task]:
    """What a model learns: what the folder's own class is for, else what its architecture is for."""
    about = _about(path)
    kinds = [str(kind) for kind in about.get("architectures") or []]
    for task in FAMILIES:
        if kinds and kinds[0] in set(_models(task).values()):
            return Choice(value=task, reason=f"the folder holds a {kinds[0]}")
    name = architecture or str(about.get("model_type"))
    for task, family in FAMILIES.items():
        if name in _models(task):
            return Choice(value=task, reason=f'"{name}" is a {family.words}')
    return Choice(value=Task.CAUSAL_LM, reason=f'nothing is known of "{name}"')


def _about(path: str | None) -> Mapping[str, Any]:
    """What a folder's config.json says; nothing where it cannot be read, which is told when the model is opened."""
    if path is None:
        return {}
    try:
        about = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _models(task: Task) -> Mapping[str, str]:
    """By architecture, the class of transformers that is made for a task."""
    mapping: Mapping[str, str] = getattr(_transformers().models.auto.modeling_auto, FAMILIES[task].mapping)
    return mapping


def config_of_architecture(name: str, keys: Mapping[str, Any], task: Task = Task.CAUSAL_LM) -> Any:
    """The transformers configuration of an architecture with its own defaults, except for `keys`.

    Raises:
        ModelError: transformers has no such model for the task, or the architecture no such key.
    """
    transformers, names = _transformers(), _models(task)
    if name not in names:
        near = get_close_matches(name, names, n=1, cutoff=0.3)
        hint = f'Did you mean "{near[0]}"?' if near else f'One that it has is "{next(iter(names))}".'
        raise ModelError(f'`model.architecture = "{name}"` is not a {FAMILIES[task].words} of transformers. {hint}')
    _check_keys(name, keys, transformers.AutoConfig.for_model(name))
    try:
        return transformers.AutoConfig.for_model(name, **keys)
    except Exception as error:  # its checks raise classes of their own
        raise ModelError(f'`model.config` does not fit "{name}": {root_cause(error)}') from error


def _check_keys(name: str, keys: Mapping[str, Any], defaults: Any) -> None:
    known = {*defaults.to_dict(), *defaults.attribute_map, *SPECIAL_TOKENS, "tie_word_embeddings"}
    for key in keys:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise ModelError(f'`model.config.{key}` is not a key of the "{name}" configuration.{hint}')


SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def config_of_folder(folder: str, task: Task) -> Any:
    """The transformers configuration in a local model folder.

    Raises:
        ModelError: the folder does not exist, or is no model folder, or its model is not for the task.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(f"`model.path`: the folder {folder} does not exist.")
    if not (path / "config.json").is_file():
        raise ModelError(f"`model.path`: {folder} holds no config.json, so it is not a Hugging Face model folder.")
    if not any(any(path.glob(pattern)) for pattern in WEIGHT_FILES):
        raise ModelError(
            f"`model.path`: {folder} holds no weights (model.safetensors). To start from random weights, give "
            "`model.architecture` and `model.config` instead."
        )
    try:
        config = _transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # its checks raise classes of their own
        raise ModelError(f"`model.path`: the config.json of {folder} cannot be used: {root_cause(error)}") from error
    if config.model_type not in _models(task):
        raise ModelError(f"`model.path`: {folder} holds a {config.model_type} model, which is no {FAMILIES[task].words}.")
    return config


def new_model(config: Any, attention: str = "eager", task: Task = Task.CAUSAL_LM) -> nn.Module:
    """A model of this configuration in FP32 with fresh weights, drawn from torch's generator on the CPU.

    Raises:
        ModelError: no model can be built from the configuration.
    """
    model = shell(config, attention, task)
    give_memory(model, torch.device("cpu"))
    fill(model, drawn(shell(config, attention, task)))
    return model


def shell(config: Any, attention: str = "eager", task: Task = Task.CAUSAL_LM) -> nn.Module:
    """A model of this configuration in FP32 on the meta device: names and shapes without memory.

    Raises:
        ModelError: no model can be built from the configuration.
    """
    try:
        with torch.device("meta"):
            model: nn.Module = _auto(task).from_config(config, dtype=torch.float32, attn_implementation=name_of(attention))
    except Exception as error:  # whatever its modules raise for numbers that do not fit together
        raise ModelError(f"`model.config`: no {config.model_type} can be built from it: {root_cause(error)}") from error
    return model


def _auto(task: Task) -> Any:
    return getattr(_transformers(), FAMILIES[task].auto)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model from a folder.

    Attributes:
        model: in FP32.
        fresh: names of the tensors that were not in the folder, or of another shape there, and start at random.
    """

    model: nn.Module
    fresh: tuple[str, ...]

    def choice(self, folder: str) -> Choice[str]:
        """What was found, in words."""
        if not self.fresh:
            return Choice(value=folder, reason="every tensor was in it")
        names = ", ".join(self.fresh[:3]) + (", ..." if len(self.fresh) > 3 else "")
        return Choice(value=folder, reason=f"{len(self.fresh)} tensors were not in it and start at random: {names}")


def load_model(folder: str, config: Any, task: Task, attention: str) -> Loaded:
    """The model of a local folder, with a new head where its own has other classes.

    Raises:
        ModelError: the weights cannot be read.
    """
    try:
        with quiet():
            model, report = _auto(task).from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                attn_implementation=name_of(attention),
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=task.has_classes,
            )
    except Exception as error:  # readers of weight files raise whatever they like, safetensors its own bare class
        raise ModelError(f"`model.path`: the weights in {folder} cannot be loaded: {root_cause(error)}") from error
    mismatched = [key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]]
    return Loaded(model=model, fresh=tuple(sorted({*report["missing_keys"], *mismatched})))


def model_facts(config: Any, task: Task) -> ModelFacts:
    """What the configuration says about size; the parameters are counted on a model without memory.

    Raises:
        ModelError: no model can be built from it.
    """
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    if layers is not None and layers < 1:
        raise ModelError(f"The configuration of the {config.model_type} asks for {layers} layers: it takes 1.")
    model = shell(config, task=task)
    return ModelFacts(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        hidden=getattr(text, "hidden_size", None),
        layers=layers,
        vocabulary=getattr(text, "vocab_size", None),
        context=getattr(text, "max_position_embeddings", None),
        attentions=_attentions(model),
    )


def _attentions(model: nn.Module) -> tuple[Attention, ...]:
    sdpa, others = (bool(getattr(model, f"_supports_{name}", False)) for name in ("sdpa", "attention_backend"))
    return (Attention.EAGER, *[Attention.SDPA] * sdpa, *[Attention.MATMUL] * (sdpa and others))


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a local folder.

    Raises:
        ModelError: there is none, or it cannot be loaded.
    """
    if not has_tokenizer(folder):
        raise ModelError(f'`data.tokenizer`: {folder} holds no tokenizer (tokenizer.json). Use "bytes" or another folder.')
    try:
        return _transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises bare exceptions of its own
        raise ModelError(f"`data.tokenizer`: that of {folder} cannot be loaded: {root_cause(error)}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without bars and reports of its own, which would cross ours: what they say is told by us."""
    logging = _transformers().utils.logging
    was_on, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_on:
            logging.enable_progress_bar()


def _transformers() -> Any:
    if find_spec("transformers") is None:
        raise ModelError("`halfstep train` needs transformers, which is not installed: pip install 'halfstep[train]'.")
    import transformers

    return transformers


def root_cause(error: BaseException) -> str:
    """The first line of what went wrong first."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().partition("\n")[0]
