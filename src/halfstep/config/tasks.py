"""Decides what a model learns to do, and sees that model, loss and data are of that kind."""

from __future__ import annotations

from collections.abc import Callable

from halfstep.config.choice import ASKED_FOR, Choice
from halfstep.config.decisions import Decisions, is_auto
from halfstep.config.options import Task
from halfstep.config.run import LoraRun
from halfstep.config.schema import LoraSection, Written
from halfstep.errors import ConfigError

TaskOf = Callable[[str | None, str | None], Choice[Task]]
"""From a model's folder, or else its architecture, to what such a model usually learns."""
OF_TOKENS = ("corpus", "tokenizer", "packing", "too_long")
OF_FILES = (*OF_TOKENS, "format", "kind", "columns", "image_size")
"""Keys of `data` that ask for something only of tokens, and only of files."""
RANK = 8
ALL_LINEAR = "all-linear"
"""What peft calls every linear layer but the head."""


def language_model(path: str | None, architecture: str | None) -> Choice[Task]:
    """What is believed of a model that nobody has looked at."""
    return Choice(value=Task.CAUSAL_LM, reason="usual for language models")


def resolve_task(written: Written, task_of: TaskOf, decisions: Decisions) -> Task:
    """What the model of the configuration learns.

    Raises:
        ConfigError: the loss or the data that it takes are not given.
    """
    task = decisions.take("model.task", written.model.task, lambda: _task(written, task_of))
    if task is Task.OWN and (written.model.loss is None or written.data.factory is None):
        raise ConfigError(
            f'`model.task = "{task}"` needs a loss and data of your own: `model.loss` and `data.factory`, each as "module:name".'
        )
    if written.lora is not None and written.model.frozen is not None:
        raise ConfigError("`model.frozen` has no effect beside [lora], which freezes everything but the adapters. Leave it out.")
    if written.data.config is not None and written.data.factory is None:
        raise ConfigError("`data.config` holds the arguments of `data.factory`, which is not given. Leave it out.")
    if written.data.factory is not None and written.data.files is not None:
        raise ConfigError("`data.factory` and `data.files` are both given. Leave one of them out.")
    if not task.has_classes and not is_auto(written.data.classes):
        raise ConfigError(f'`data.classes` has no effect on the task "{task}". Leave it out.')
    _refuse_without_effect(written, task)
    return task


def _refuse_without_effect(written: Written, task: Task) -> None:
    """Say it where a setting asks for what neither pictures nor data and losses of the user's own have."""
    own = written.data.factory is not None
    for name in OF_FILES if own else OF_TOKENS if task is Task.IMAGE_CLASSIFICATION else ():
        if not is_auto(getattr(written.data, name)):
            raise ConfigError(f"`data.{name}` has no effect on {'data of your own' if own else 'pictures'}. Leave it out.")
    if own and written.evaluation.files is not None:
        raise ConfigError(
            "`evaluation.files` has no effect on data of your own: let `data.factory` return a tuple of data to train on and "
            "data that are held out."
        )
    if written.model.loss is not None and not is_auto(written.model.label_smoothing):
        raise ConfigError("`model.label_smoothing` has no effect on a loss of your own. Leave it out.")


def _task(written: Written, task_of: TaskOf) -> Choice[Task]:
    model = written.model
    if written.data.factory is not None and model.loss is not None:
        return Choice(value=Task.OWN, reason="loss and data are your own")
    if model.factory is None:
        return task_of(model.path, model.architecture or "llama")
    if written.data.factory is not None:
        raise ConfigError(
            "What a model of your own learns from data of your own is not known: give `model.loss`, or say what the model is "
            'by `model.task`, as "image-classification".'
        )
    return language_model(None, None)


def resolve_lora(asked: LoraSection | None, decisions: Decisions) -> LoraRun | None:
    """The adapters; `None` where none are asked for."""
    if asked is None:
        return None
    rank = decisions.default("lora.rank", asked.rank, RANK, "usual")
    targets = decisions.default("lora.targets", asked.targets, [ALL_LINEAR], "every linear layer but the head")
    return LoraRun(
        rank=rank,
        alpha=decisions.default("lora.alpha", asked.alpha, 2.0 * rank, "usual: twice the rank"),
        dropout=decisions.default("lora.dropout", asked.dropout, 0.0, "usual"),
        targets=tuple(targets),
    )


def asked_classes(written: Written) -> tuple[str, ...] | None:
    """The classes that the configuration names; `None` where they are left to the data."""
    asked = written.data.classes
    return None if is_auto(asked) or asked is None else tuple(asked)


def chosen_classes(written: Written, found: Choice[tuple[str, ...]] | None, decisions: Decisions) -> tuple[str, ...] | None:
    """The classes of the run, with their reason; `None` where there are none."""
    if found is None:
        return None
    reason = ASKED_FOR if asked_classes(written) is not None else found.reason
    decisions.choices["data.classes"] = Choice(value=found.value, reason=reason)
    return found.value
