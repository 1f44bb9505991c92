"""Which weights are trained: all but the frozen ones, or adapters of low rank beside them, through peft."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

from torch import nn

from halfstep.config.choice import Choice
from halfstep.config.run import LoraRun
from halfstep.config.tasks import ALL_LINEAR
from halfstep.errors import ModelError
from halfstep.train.models import root_cause

MOST_NAMES = 40
"""Names that an error shows."""


def freeze(model: nn.Module, patterns: Sequence[str]) -> Choice[int]:
    """Take the parameters that the patterns name out of training, and say how many numbers that leaves.

    A pattern names a parameter, or a module with all that is below it; `*` stands for anything.

    Raises:
        ModelError: a pattern names nothing, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        frozen = [name for name in names if _names(pattern, name)]
        if not frozen:
            raise ModelError(f'`model.frozen`: "{pattern}" names no parameter of the model. Its parameters are {shown(names)}.')
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
    choice = trained(model)
    if choice.value == 0:
        raise ModelError("`model.frozen` names every parameter of the model: nothing is left to train.")
    return choice


def _names(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def trained(model: nn.Module) -> Choice[int]:
    """How many of the model's numbers are trained."""
    every = sum(parameter.numel() for parameter in model.parameters())
    some = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return Choice(value=some, reason=f"{some / max(1, every):.2%} of {every:,} parameters")


def shown(names: Iterable[str]) -> str:
    """The names, with `*` for the number of a layer, each once."""
    short = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))
    more = f" and {len(short) - MOST_NAMES} more" if len(short) > MOST_NAMES else ""
    return ", ".join(short[:MOST_NAMES]) + more


def with_adapters(model: nn.Module, settings: LoraRun, fresh: Sequence[str]) -> nn.Module:
    """The model with adapters beside the modules that the targets name; they alone are trained, and what is fresh.

    Args:
        model: of transformers, or the user's own.
        settings: of the adapters.
        fresh: names of the tensors that start at random, as a new head, and are trained whole.

    Raises:
        ModelError: a target names nothing, or peft cannot adapt what it names.
    """
    if find_spec("peft") is None:
        raise ModelError("`[lora]` needs peft, which is not installed: pip install 'halfstep[train]'.")
    from peft import LoraConfig, get_peft_model

    whole = sorted({name.rpartition(".")[0] for name in fresh})
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=_targets(model, settings.targets, whole),
        modules_to_save=whole or None,
        exclude_modules=whole or None,
    )
    try:
        with _without_warnings():
            adapted: nn.Module = get_peft_model(model, config)
    except ValueError as error:
        raise ModelError(f"`lora.targets = {list(settings.targets)}` cannot be: {root_cause(error)}") from error
    return adapted


def _targets(model: nn.Module, patterns: Sequence[str], whole: Sequence[str]) -> str | list[str]:
    from transformers.pytorch_utils import Conv1D

    names = [name for name, module in model.named_modules() if _has_weight(module) and name not in whole]
    if list(patterns) == [ALL_LINEAR] and any(isinstance(model.get_submodule(name), nn.Linear | Conv1D) for name in names):
        return ALL_LINEAR
    found: dict[str, None] = {}
    for pattern in patterns:
        named = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")]
        if not named:
            raise ModelError(f'`lora.targets`: "{pattern}" names no module of the model. Its modules are {shown(names)}.')
        found.update(dict.fromkeys(named))
    return list(found)


def _has_weight(module: nn.Module) -> bool:
    """Whether adapters could stand beside it: linear layers, those of GPT-2 too, embeddings and convolutions."""
    weight = getattr(module, "weight", None)
    return not list(module.children()) and weight is not None and weight.dim() >= 2


def is_adapted(model: nn.Module) -> bool:
    """Whether the model has adapters."""
    return hasattr(model, "merge_and_unload")


def merged(model: Any) -> nn.Module:
    """A copy of an adapted model without adapters, whose weights are what both came to; the model itself stays as it is."""
    with _without_warnings():
        plain: nn.Module = copy.deepcopy(model).merge_and_unload()
    return plain


@contextmanager
def _without_warnings() -> Iterator[None]:
    """peft without those of a name that transformers gives up, and of a setting that it sets right itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
