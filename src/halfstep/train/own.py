"""What is the user's own: a model, a loss, data. Each is named as "package.module:name" and imported."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset, default_collate

from halfstep.config.facts import ModelFacts
from halfstep.engine.loss import LossFunction
from halfstep.errors import ConfigError, DataError, ModelError
from halfstep.train.order import shuffled


def own_model(reference: str, arguments: Mapping[str, Any]) -> nn.Module:
    """The model that `model.factory` makes of `model.config`.

    Raises:
        UsageError: there is no such factory, it fails, or what it makes is no model.
    """
    model = called("model.factory", reference, arguments)
    if not isinstance(model, nn.Module):
        raise ModelError(f'`model.factory = "{reference}"` made {type(model).__name__}; it must be a `torch.nn.Module`.')
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f'`model.factory = "{reference}"` made a model without a parameter to train.')
    return model


def facts_of_own(model: nn.Module) -> ModelFacts:
    """What is known of a model of the user's own."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelFacts(parameters=parameters, hidden=None, layers=None, vocabulary=None, context=None)


def own_loss(reference: str) -> LossFunction:
    """The function that `model.loss` names: `loss(model, batch)`, as `Engine` takes it.

    Raises:
        ConfigError: there is no such function.
    """
    loss: LossFunction = _imported("model.loss", reference)
    return loss


class OwnSamples(Dataset[Any]):
    """Samples of a data set of the user's own, as one that hands out whole batches.

    Args:
        samples: has a length and hands out samples by number; its `collate_fn` makes a batch of a list of them, where it has one.
        chosen: the numbers of those that are meant.
    """

    def __init__(self, samples: Any, chosen: Sequence[int]) -> None:
        self._samples, self._chosen = samples, chosen
        self._collate: Callable[[list[Any]], Any] = getattr(samples, "collate_fn", default_collate)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._chosen)

    def __getitem__(self, index: int) -> Any:
        """One sample, as a batch of one."""
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """The samples as one batch."""
        return self._collate([self._samples[int(self._chosen[index])] for index in indices])


def own_data(reference: str, arguments: Mapping[str, Any], share: float) -> tuple[OwnSamples, OwnSamples, str]:
    """The samples to train on, those held out, and how they were chosen, of what `data.factory` makes of `data.config`.

    Args:
        reference: names a function that returns a data set, or a tuple of one to train on and one that is held out.
        arguments: of the function.
        share: how much is held out of a single one.

    Raises:
        UsageError: there is no such factory, it fails, or what it makes is no data set with a length.
    """
    made = called("data.factory", reference, arguments)
    several = made if isinstance(made, tuple) else (made,)
    for each in several:
        if not (hasattr(each, "__getitem__") and hasattr(each, "__len__")) or len(several) > 2:
            kinds = ", ".join(type(one).__name__ for one in several)
            raise DataError(
                f'`data.factory = "{reference}"` made ({kinds}); it must be a data set with `__len__` and `__getitem__`, or a '
                "tuple of one to train on and one that is held out."
            )
        if len(each) == 0:
            raise DataError(f'`data.factory = "{reference}"` made a data set without a sample.')
    if len(several) == 2:
        return OwnSamples(several[0], range(len(several[0]))), OwnSamples(several[1], range(len(several[1]))), "given as such"
    order, held_out = shuffled(len(made), seed=0, epoch=0), round(share * len(made))
    train, rest = sorted(order[held_out:].tolist()), sorted(order[:held_out].tolist())
    return OwnSamples(made, train), OwnSamples(made, rest), f"{held_out:,} of {len(made):,} samples"


def called(key: str, reference: str, arguments: Mapping[str, Any]) -> Any:
    """What the function returns that `key` names as "package.module:name".

    Raises:
        ConfigError: there is no such function, or it fails; the message says where.
    """
    function = _imported(key, reference)
    try:
        return function(**arguments)
    except Exception as error:  # whatever the user's code raises
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ConfigError(f'`{key} = "{reference}"`: {reference.partition(":")[2]}({given}) failed: {told(error)}') from error


def _imported(key: str, reference: str) -> Any:
    """What `package.module:name` names, looked for in the present folder first, as `python -m` does."""
    name, _, attribute = reference.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f'`{key} = "{reference}"`: {name} cannot be imported: {told(error)}') from error
        raise ConfigError(f'`{key} = "{reference}"`: there is no module {error.name} in {here}, and none is installed.') from None
    except Exception as error:  # whatever the user's module raises
        raise ConfigError(f'`{key} = "{reference}"`: {name} cannot be imported: {told(error)}') from error
    found = getattr(module, attribute, None)
    if callable(found):
        return found
    own = [each for each, value in vars(module).items() if getattr(value, "__module__", None) == name and callable(value)]
    raise ConfigError(f'`{key} = "{reference}"`: {name} has no function {attribute}. It has {", ".join(own) or "none"}.')


def told(error: Exception) -> str:
    """What an error of the user's code says, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
