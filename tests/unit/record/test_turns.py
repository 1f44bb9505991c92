"""In which turn of which loops an event happens, told from the frames alone."""

from collections.abc import Callable
from typing import Any

import pytest

from halfstep.events.vocabulary import Backward, EpochBegin, EpochEnd, Fetch, SchedulerStep

START = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(6, 2)), batch_size=2, shuffle=True)

def step(x):
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()

"""


def turns(watched: Any) -> list[tuple[int, ...]]:
    return [tuple(t.index for t in e.loops) for e in watched.events if isinstance(e, Backward)]


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("for i in range(3):\n    step(torch.randn(2, 2))", [(0,), (1,), (2,)]),
        ("for (x,) in loader:\n    step(x)", [(0,), (1,), (2,)]),
        ("for i, (x,) in enumerate(loader, 1):\n    step(x)", [(0,), (1,), (2,)]),
        ("for e in range(2):\n    for (x,) in loader:\n        step(x)", [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]),
        (
            "def epoch():\n    for (x,) in loader:\n        step(x)\nfor e in range(2):\n    epoch()",
            [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)],
        ),
        ("i = 0\nwhile i < 2:\n    step(torch.randn(2, 2))\n    i += 1", [(0,), (1,)]),
        ("step(torch.randn(2, 2))\nstep(torch.randn(2, 2))", [(), ()]),
        ("for e in range(2):\n    for (x,) in loader:\n        step(x)\n        break", [(0, 0), (1, 0)]),
    ],
)
def test_turns_are_those_of_the_loops(run: Callable[..., Any], loop: str, expected: list[tuple[int, ...]]) -> None:
    assert turns(run(f"{START}{loop}\n")) == expected


def test_two_calls_in_one_turn_are_one_turn(run: Callable[..., Any]) -> None:
    assert turns(run(f"{START}for i in range(2):\n    step(torch.ones(1, 2)); step(torch.ones(1, 2))\n")) == [
        (0,),
        (0,),
        (1,),
        (1,),
    ]


def test_an_epoch_ends_before_what_follows_its_loop(run: Callable[..., Any]) -> None:
    text = f"{START}scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
    text += "for e in range(2):\n    for (x,) in loader:\n        step(x)\n        break\n    scheduler.step()\n"
    kinds = (EpochBegin, Fetch, Backward, EpochEnd, SchedulerStep)
    told = [type(e).__name__ for e in run(text).events if isinstance(e, kinds)]
    assert told == ["EpochBegin", "Fetch", "Backward", "EpochEnd", "SchedulerStep"] * 2


def test_a_list_of_batches_is_a_loader(run: Callable[..., Any]) -> None:
    text = f"{START}batches = [torch.randn(2, 2)] * 2\ndef epoch():\n    for x in batches:\n        step(x)\n"
    watched = run(f"{text}for e in range(2):\n    epoch()\n")
    passes = [(e.loader.name, e.index) for e in watched.events if isinstance(e, EpochBegin)]
    assert passes == [("batches", 0), ("batches", 1)]
    assert sum(isinstance(e, Fetch) for e in watched.events) == 4
