"""Micro-batches as loaders give them: tensors, mappings, sequences, named tuples, dataclasses, and what lies in them."""

from __future__ import annotations

import math
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import SGD

from halfstep import Engine
from halfstep.engine.batch import first_non_finite, map_tensors, num_samples, split, tensors, to_device

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Record:
    x: Tensor
    y: Tensor
    name: str = "record"


class Encoding(UserDict[str, Any]):
    """As tokenizers of transformers return it: a mapping that is no dict, with attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Stubborn(UserDict[str, Any]):
    """A mapping that cannot be made of another one."""

    def __init__(self, *, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.data = {"x": x, "y": y}


X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6.0)
SHAPES: dict[str, Any] = {
    "tuple": (X, Y),
    "list": [X, Y],
    "dict": {"x": X, "y": Y},
    "OrderedDict": OrderedDict(x=X, y=Y),
    "mapping": Encoding({"x": X, "y": Y}),
    "named tuple": Pair(X, Y),
    "dataclass": Record(x=X, y=Y),
    "nested": {"inputs": {"x": X}, "targets": [Y, "a note", None]},
}
every_shape = pytest.mark.parametrize("batch", SHAPES.values(), ids=SHAPES)


@every_shape
def test_every_tensor_is_changed_and_the_shape_stays(batch: Any) -> None:
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert type(doubled) is type(batch)
    found, before = dict(tensors(doubled)), dict(tensors(batch))
    assert found.keys() == before.keys()
    assert len(found) == 2
    assert all(torch.equal(found[path], before[path] * 2) for path in found)


@every_shape
def test_moving_a_batch_where_it_is_copies_nothing(batch: Any) -> None:
    moved = dict(tensors(to_device(batch, torch.device("cpu"))))
    assert all(moved[path] is tensor for path, tensor in tensors(batch))


def test_what_is_no_tensor_is_left_alone() -> None:
    note = object()
    assert map_tensors({"note": note, "text": ["a", "b"]}, lambda tensor: 0) == {"note": note, "text": ["a", "b"]}


def test_a_mapping_that_cannot_be_rebuilt_becomes_a_dict() -> None:
    changed = map_tensors(Stubborn(x=X, y=Y), lambda tensor: tensor + 1)
    assert type(changed) is dict
    assert torch.equal(changed["x"], X + 1)


def test_each_tensor_is_named_by_the_expression_that_reaches_it() -> None:
    assert [path for path, _ in tensors(SHAPES["nested"])] == ["batch['inputs']['x']", "batch['targets'][0]"]
    assert [path for path, _ in tensors(SHAPES["dataclass"])] == ["batch.x", "batch.y"]
    assert [path for path, _ in tensors(SHAPES["named tuple"])] == ["batch[0]", "batch[1]"]
    assert [path for path, _ in tensors(X)] == ["batch"]


@every_shape
def test_samples_are_counted_by_the_first_dimension(batch: Any) -> None:
    assert num_samples(batch) == 6


@pytest.mark.parametrize(
    ("batch", "count"),
    [(X, 6), (torch.tensor(3.0), 1), ({"temperature": torch.tensor(3.0), "x": X}, 6), ("text", 1), ([], 1), (None, 1)],
)
def test_a_scalar_is_no_first_dimension(batch: Any, count: int) -> None:
    assert num_samples(batch) == count


@given(parts=st.integers(1, 9))
def test_parts_are_even_and_together_the_whole(parts: int) -> None:
    pieces = split({"x": X, "y": Y}, parts)
    sizes = [num_samples(piece) for piece in pieces]
    assert len(pieces) == min(parts, 6)
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([piece["x"] for piece in pieces]), X)
    assert torch.equal(torch.cat([piece["y"] for piece in pieces]), Y)


@every_shape
def test_every_shape_can_be_split(batch: Any) -> None:
    first, second = split(batch, 2)
    assert type(first) is type(batch)
    assert [num_samples(first), num_samples(second)] == [3, 3]


def test_what_has_no_sample_dimension_goes_to_every_part() -> None:
    shared, scalar = torch.ones(1, 2), torch.tensor(0.5)
    for part in split({"x": X, "positions": shared, "temperature": scalar}, 3):
        assert part["positions"] is shared
        assert part["temperature"] is scalar


def nan_in(tensor: Tensor, *index: int) -> Tensor:
    spoilt = tensor.clone()
    spoilt[index] = math.nan
    return spoilt


@pytest.mark.parametrize(
    ("batch", "where"),
    [
        ({"x": nan_in(X, 3, 1)}, "batch['x'], sample 3"),
        ((X, nan_in(Y, 5)), "batch[1], sample 5"),
        (Record(x=X, y=Y / 0), "batch.y, sample 0"),
        ({"temperature": torch.tensor(math.inf)}, "batch['temperature']"),
        ({"x": torch.full((2, 3, 4), -math.inf, dtype=torch.bfloat16)}, "batch['x'], sample 0"),
        ({"x": X, "labels": torch.tensor([1, -100]), "mask": torch.tensor([True])}, None),
        ({"x": torch.empty(0, 3)}, None),
        ("text", None),
    ],
)
def test_the_first_value_that_is_not_finite_is_found(batch: Any, where: str | None) -> None:
    assert first_non_finite(batch) == where


def taken(batch: Any) -> tuple[Tensor, Tensor]:
    found = dict(tensors(batch))
    return next(t for path, t in found.items() if t.dim() == 2), next(t for path, t in found.items() if t.dim() == 1)


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = taken(batch)
    return (model(x).squeeze(1) - y).square().mean()


@every_shape
def test_an_engine_trains_on_any_shape_and_gives_it_to_the_loss_unchanged(batch: Any) -> None:
    seen: list[Any] = []

    def remembered(model: nn.Module, given: Any) -> Tensor:
        seen.append(given)
        return loss(model, given)

    model = nn.Linear(2, 1)
    engine = Engine(model, SGD(model.parameters(), lr=0.001), loss=remembered, precision="fp32")
    assert engine.update([batch]).applied
    assert seen[0] is batch
    assert engine.counters.samples == 6


def test_a_packed_sequence_goes_through_whole() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 2), torch.randn(2, 2)])
    model = nn.Linear(2, 1)

    def packed_loss(model: nn.Module, batch: PackedSequence) -> Tensor:
        return model(batch.data).square().mean()

    engine = Engine(model, SGD(model.parameters(), lr=0.001), loss=packed_loss, precision="fp32")
    assert engine.update([packed]).applied
