"""Causal language models of transformers: from an architecture's name and keys, or from a local folder.

Nothing here asks a network: a model that is not on this machine is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.config.choice import Choice
from halfstep.config.facts import ModelFacts
from halfstep.errors import ModelError

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def has_tokenizer(folder: str | None) -> bool:
    """Whether the folder holds a tokenizer."""
    return folder is not None and any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def config_of_architecture(name: str, keys: Mapping[str, Any]) -> Any:
    """The transformers configuration of an architecture with its own defaults, except for `keys`.

    Raises:
        ModelError: transformers has no such causal language model, or the architecture no such key.
    """
    transformers = _transformers()
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if name not in names:
        near = get_close_matches(name, names, n=1, cutoff=0.3)
        hint = f'Did you mean "{near[0]}"?' if near else 'One that it has is "llama".'
        raise ModelError(f'`model.architecture = "{name}"` is not a causal language model of transformers. {hint}')
    _check_keys(name, keys, transformers.AutoConfig.for_model(name))
    try:
        return transformers.AutoConfig.for_model(name, **keys)
    except Exception as error:  # its checks raise classes of their own
        raise ModelError(f'`model.config` does not fit "{name}": {_root_cause(error)}') from error


def _check_keys(name: str, keys: Mapping[str, Any], defaults: Any) -> None:
    known = {*defaults.to_dict(), *defaults.attribute_map, "tie_word_embeddings"}
    for key in keys:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise ModelError(f'`model.config.{key}` is not a key of the "{name}" configuration.{hint}')


def config_of_folder(folder: str) -> Any:
    """The transformers configuration in a local model folder.

    Raises:
        ModelError: the folder does not exist, or is no model folder, or its model is no causal language model.
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
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # its checks raise classes of their own
        raise ModelError(f"`model.path`: the config.json of {folder} cannot be used: {_root_cause(error)}") from error
    if config.model_type not in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"`model.path`: {folder} holds a {config.model_type} model, which is no causal language model.")
    return config


def new_model(config: Any, attention: str = "eager") -> nn.Module:
    """A model of this configuration in FP32 with fresh weights, drawn from torch's generator.

    Raises:
        ModelError: no model can be built from the configuration.
    """
    try:
        model: nn.Module = _transformers().AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention
        )
    except Exception as error:  # whatever its modules raise for numbers that do not fit together
        raise ModelError(f"`model.config`: no {config.model_type} can be built from it: {_root_cause(error)}") from error
    return model


def load_model(folder: str, config: Any, attention: str) -> tuple[nn.Module, Choice[str]]:
    """The model of a local folder in FP32, and what was found there.

    Raises:
        ModelError: the weights cannot be read.
    """
    try:
        with quiet():
            model, report = _transformers().AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                attn_implementation=attention,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # readers of weight files raise whatever they like, safetensors its own bare class
        raise ModelError(f"`model.path`: the weights in {folder} cannot be loaded: {_root_cause(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        return model, Choice(value=folder, reason=f"{len(missing)} tensors were not in it and start at random: {names}")
    return model, Choice(value=folder, reason="every tensor was in it")


def model_facts(config: Any) -> ModelFacts:
    """What the configuration says about size; the parameters are counted on a model without memory.

    Raises:
        ModelError: no model can be built from it.
    """
    text = config.get_text_config()
    if text.num_hidden_layers < 1:
        raise ModelError(f"The configuration of the {config.model_type} asks for {text.num_hidden_layers} layers: it takes 1.")
    with torch.device("meta"):
        model = new_model(config)
    return ModelFacts(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
        context=getattr(text, "max_position_embeddings", None),
        has_sdpa=bool(getattr(model, "_supports_sdpa", False)),
    )


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
        raise ModelError(f"`data.tokenizer`: that of {folder} cannot be loaded: {_root_cause(error)}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without bars of its own, which would cross ours."""
    logging = _transformers().utils.logging
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _transformers() -> Any:
    if find_spec("transformers") is None:
        raise ModelError("`halfstep train` needs transformers, which is not installed: pip install 'halfstep[train]'.")
    import transformers

    return transformers


def _root_cause(error: BaseException) -> str:
    """The first line of what went wrong first."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().partition("\n")[0]
