"""Names of classes, their order, and labels that are none."""

from __future__ import annotations

import pytest
from transformers import BertConfig

from halfstep.errors import DataError
from halfstep.train.classes import check_label, classes_of_model, decide_classes, label_of, set_classes


@pytest.mark.parametrize(("value", "name"), [("cat", "cat"), (" cat ", "cat"), (3, "3"), (True, "true"), (-1, "-1")])
def test_a_label_is_a_name_or_a_number(value: object, name: str) -> None:
    assert label_of(value, "here", "label") == name


@pytest.mark.parametrize("value", [None, "", "  ", 0.5, ["cat"]])
def test_anything_else_is_refused_with_its_place(value: object) -> None:
    with pytest.raises(DataError) as error:
        label_of(value, "rows.jsonl, line 3", "kind")
    assert str(error.value) == f"rows.jsonl, line 3: `kind` is {value!r}; a label is the name of a class or its number."


def test_classes_are_in_the_order_of_their_numbers_or_names() -> None:
    assert decide_classes(["10", "9", "2"], None, None).value == ("2", "9", "10")
    assert decide_classes(["dog", "cat", "dog"], None, None).value == ("cat", "dog")


def test_a_model_that_knows_the_labels_keeps_its_classes() -> None:
    choice = decide_classes(["dog"], ["cow", "dog", "cat"], None)
    assert (choice.value, choice.reason) == (("cow", "dog", "cat"), "those of the model")
    assert decide_classes(["dog", "bee"], ["cow", "dog", "cat"], None).value == ("bee", "dog")
    assert decide_classes(["dog"], ["cow", "dog"], ["dog", "bee"]).value == ("dog", "bee")


@pytest.mark.parametrize(("found", "shown"), [(["cat", "cat"], '"cat"'), ([], "missing")])
def test_one_class_is_nothing_to_tell_apart(found: list[str], shown: str) -> None:
    with pytest.raises(DataError) as error:
        decide_classes(found, None, None)
    assert str(error.value) == f"All labels of the data are {shown}: it takes two classes to tell apart."


def test_a_label_outside_the_classes_is_named_with_them() -> None:
    check_label("cat", None, "here")
    check_label("cat", ["cat"], "here")
    with pytest.raises(DataError) as error:
        check_label("cow", ["cat", "dog"], "images/cow/1.png")
    assert str(error.value) == 'images/cow/1.png: the label "cow" is none of the 2 classes, which are "cat", "dog".'
    with pytest.raises(DataError, match='"19" and 5 more'):
        check_label("cow", [str(number) for number in range(25)], "here")


def test_a_configuration_remembers_its_classes() -> None:
    config = BertConfig()
    assert classes_of_model(config) is None
    config.architectures = ["BertForSequenceClassification"]
    assert classes_of_model(config) == ["0", "1"]
    set_classes(config, ["a", "b", "c"])
    assert (classes_of_model(config), config.num_labels, config.label2id) == (["a", "b", "c"], 3, {"a": 0, "b": 1, "c": 2})
