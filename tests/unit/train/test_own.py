"""Models, losses and data of the user's own, and everything that can be wrong with them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from halfstep.errors import ConfigError, DataError, ModelError, UsageError
from halfstep.train.own import own_data, own_loss, own_model

MODULE = """\
import torch

def build(width=2):
    return torch.nn.Linear(width, 1)

def constant():
    return torch.nn.Identity()

def number():
    return 3

def broken(width):
    raise KeyError("width")

def one():
    return list(range(20))

def two():
    return [1, 2, 3], [4, 5]

def three():
    return [1], [2], [3]

def stream():
    return iter([1, 2])

def nothing():
    return []

class Sentences:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return "x" * index

    def collate_fn(self, samples):
        return torch.tensor([len(sample) for sample in samples])
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The present folder holds the module, which nobody remembers afterwards."""
    (tmp_path / "mine_for_test.py").write_text(MODULE)
    (tmp_path / "torn_for_test.py").write_text("import no_such_library\n")
    (tmp_path / "wrong_for_test.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("mine_for_test", None)


def test_a_factory_is_called_with_its_arguments() -> None:
    model = own_model("mine_for_test:build", {"width": 5})
    assert isinstance(model, torch.nn.Linear)
    assert model.in_features == 5


@pytest.mark.parametrize(
    ("reference", "kind", "sentence"),
    [
        (
            "mine_for_test:bild",
            ConfigError,
            '`model.factory = "mine_for_test:bild"`: mine_for_test has no function bild. It has build, constant, number, broken, '
            "one, two, three, stream, nothing, Sentences.",
        ),
        (
            "mine_for_test:number",
            ModelError,
            '`model.factory = "mine_for_test:number"` made int; it must be a `torch.nn.Module`.',
        ),
        (
            "mine_for_test:constant",
            ModelError,
            '`model.factory = "mine_for_test:constant"` made a model without a parameter to train.',
        ),
    ],
)
def test_a_factory_that_is_none_is_one_sentence(reference: str, kind: type[UsageError], sentence: str) -> None:
    with pytest.raises(kind) as error:
        own_model(reference, {})
    assert str(error.value) == sentence


def test_what_the_users_code_raises_is_told_with_its_place(here: Path) -> None:
    with pytest.raises(ConfigError) as error:
        own_model("mine_for_test:broken", {"width": 3})
    assert str(error.value) == (
        "`model.factory = \"mine_for_test:broken\"`: broken(width=3) failed: KeyError: 'width' "
        f"({here}/mine_for_test.py, line 13)"
    )


def test_a_module_that_cannot_be_imported_is_told_with_the_cause(here: Path) -> None:
    with pytest.raises(ConfigError) as missing:
        own_model("no_such_module:build", {})
    assert str(missing.value) == (
        f'`model.factory = "no_such_module:build"`: there is no module no_such_module in {here}, and none is installed.'
    )
    with pytest.raises(ConfigError) as torn:
        own_model("torn_for_test:build", {})
    assert str(torn.value) == (
        '`model.factory = "torn_for_test:build"`: torn_for_test cannot be imported: ModuleNotFoundError: No module named '
        f"'no_such_library' ({here}/torn_for_test.py, line 1)"
    )
    with pytest.raises(ConfigError, match=r"wrong_for_test cannot be imported: ZeroDivisionError: division by zero \("):
        own_loss("wrong_for_test:loss")


def test_one_data_set_is_divided_and_two_are_taken_as_they_are() -> None:
    train, held_out, how = own_data("mine_for_test:one", {}, 0.1)
    assert how == "2 of 20 samples"
    assert sorted([*train.__getitems__(range(18)).tolist(), *held_out.__getitems__([0, 1]).tolist()]) == list(range(20))
    train, held_out, how = own_data("mine_for_test:two", {}, 0.1)
    assert (train.__getitems__([0, 1, 2]).tolist(), held_out.__getitems__([1]).tolist(), how) == ([1, 2, 3], [5], "given as such")


def test_a_data_set_makes_batches_in_its_own_way() -> None:
    train, _, _ = own_data("mine_for_test:Sentences", {}, 0.0)
    assert train.__getitems__([2, 0]).tolist() == [2, 0]


@pytest.mark.parametrize(("name", "made"), [("stream", "list_iterator"), ("number", "int"), ("three", "list, list, list")])
def test_data_that_are_no_data_set_are_refused(name: str, made: str) -> None:
    with pytest.raises(DataError) as error:
        own_data(f"mine_for_test:{name}", {}, 0.1)
    assert str(error.value) == (
        f'`data.factory = "mine_for_test:{name}"` made ({made}); it must be a data set with `__len__` and `__getitem__`, or a '
        "tuple of one to train on and one that is held out."
    )


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(DataError) as error:
        own_data("mine_for_test:nothing", {}, 0.1)
    assert str(error.value) == '`data.factory = "mine_for_test:nothing"` made a data set without a sample.'
