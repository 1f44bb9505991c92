"""Two ranks for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distributed.ranks import Ended, Ranks

Both = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def _pairs() -> Iterator[list[Ranks]]:
    pairs: list[Ranks] = []
    yield pairs
    for pair in pairs:
        pair.close()


@pytest.fixture
def both(_pairs: list[Ranks]) -> Both:
    """Run a function on two ranks, each with the process group made; what it returns on each."""

    def run(work: Callable[..., Any], *args: Any) -> list[Any]:
        if not _pairs or not _pairs[-1].alive:
            _pairs.append(Ranks())
        return _pairs[-1](work, *args)

    return run


@pytest.fixture
def started() -> Iterator[Callable[..., list[Ended]]]:
    """Run a function on ranks that torchrun would have started, once, and how it ended on each; their processes then end."""
    made: list[Ranks] = []

    def run(work: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Ended]:
        made.append(Ranks(joined=False))
        made[-1].start(work, *args)
        return made[-1].ends(timeout_s)

    yield run
    for pair in made:
        pair.close()
