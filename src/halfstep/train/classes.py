"""The classes of labelled data: their names, their order, and labels that are none of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from halfstep.config.choice import ASKED_FOR, Choice
from halfstep.errors import DataError

MOST_NAMES = 20
"""Classes that an error shows."""


def label_of(value: object, where: str, column: str) -> str:
    """The name of a class as a row has it: a text, or a whole number.

    Raises:
        DataError: it is neither, or empty.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or (isinstance(value, str) and value.strip()):
        return str(value).strip()
    raise DataError(f"{where}: `{column}` is {value!r}; a label is the name of a class or its number.")


def check_label(name: str, classes: Sequence[str] | None, where: str) -> None:
    """Raise a `DataError` unless the label is one of the classes; where they are not known yet every label is."""
    if classes is not None and name not in classes:
        raise DataError(f'{where}: the label "{name}" is none of the {len(classes):,} classes, which are {_shown(classes)}.')


def _shown(classes: Sequence[str]) -> str:
    more = f" and {len(classes) - MOST_NAMES:,} more" if len(classes) > MOST_NAMES else ""
    return ", ".join(f'"{name}"' for name in classes[:MOST_NAMES]) + more


def decide_classes(found: Iterable[str], own: Sequence[str] | None, asked: Sequence[str] | None) -> Choice[tuple[str, ...]]:
    """The classes of a run, in the order of the model's outputs.

    Args:
        found: the labels in the data.
        own: the classes that the model can tell apart already; `None` where it is no classifier yet.
        asked: the classes that the user names.

    Raises:
        DataError: there are fewer than two.
    """
    names = sorted(set(found), key=_in_order)
    if asked is not None:
        choice = Choice(value=tuple(asked), reason=ASKED_FOR)
    elif own is not None and set(names) <= set(own):
        choice = Choice(value=tuple(own), reason="those of the model")
    else:
        choice = Choice(value=tuple(names), reason="the labels of the data, in the order of their names")
    if len(choice.value) < 2:
        raise DataError(f"All labels of the data are {_shown(choice.value) or 'missing'}: it takes two classes to tell apart.")
    return choice


def _in_order(name: str) -> tuple[bool, int, str]:
    number = name.removeprefix("-").isdecimal()
    return (not number, int(name) if number else 0, name)


def classes_of_model(config: Any) -> list[str] | None:
    """The classes that a model from a folder can tell apart; `None` where it is no classifier yet.

    The names that transformers gives to classes without one, "LABEL_0" and so on, are read as numbers.
    """
    kinds = getattr(config, "architectures", None) or [""]
    if not kinds[0].endswith("Classification"):
        return None
    return [str(name).removeprefix("LABEL_") for _, name in sorted(config.id2label.items())]


def set_classes(config: Any, classes: Sequence[str]) -> None:
    """Give the configuration of a model its classes."""
    config.num_labels = len(classes)
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: number for number, name in enumerate(classes)}
    config.problem_type = "single_label_classification"
