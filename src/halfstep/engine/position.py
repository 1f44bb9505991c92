"""Where a run stands in its data, and how a loader is brought there again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import RandomSampler

from halfstep.engine.randomness import generator_states, host_randomness, set_generator_states, set_host_randomness
from halfstep.errors import DataError

CARRIED = (
    'With `tail = "carry"` windows lie across epochs, so that another number of ranks, or of micro-batches in a window, would '
    "not see the same samples. Go on with those of the checkpoint."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What decides an epoch's order and draws, beside the loader itself: generators as they were when it began."""

    host: dict[str, Any]
    own: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The place in the data after an update.

    Attributes:
        began: the epoch with which the call to `updates` began.
        epoch: the epoch that is read next.
        windows: windows that were read of it.
        micro_batches: micro-batches that this rank has read of it.
        ranks: how many ranks shared it.
        accumulate: micro-batches of a rank in a full window.
        seed: what decides the order of a loader that was shared out over the ranks; None where none was.
        start: how the epoch began; None where nothing of it was read.
        ahead: the host's generators before the next micro-batch was read, which was before the update's step; None where the
            loader draws no numbers in this process.
        own: states of the loader's own generators now.
    """

    began: int
    epoch: int
    windows: int
    micro_batches: int
    ranks: int
    accumulate: int
    seed: int | None = None
    start: Start | None = None
    ahead: dict[str, Any] | None = None
    own: list[str] = field(default_factory=list)

    @staticmethod
    def from_dict(state: dict[str, Any]) -> Position:
        """The position whose fields these are, as JSON has them."""
        start = state["start"]
        return Position(**{**state, "start": None if start is None else Start(**start)})

    def reopen(self, loader: Any, *, accumulate: int, ranks: int, carry: bool) -> Iterator[Any]:
        """The rest of the epoch, read from the loader.

        A loader or batch sampler with `skip(micro_batches)` is told to leave out what was read. Any other is read again from
        the beginning of the epoch, with all random generators as they were then, so that samplers, workers and random
        augmentation go the same way.

        Args:
            loader: of this rank.
            accumulate: micro-batches of this rank in a window.
            ranks: how many ranks share it now.
            carry: whether windows go on from one epoch into the next.

        Raises:
            DataError: the same samples would not come again, with other ranks or another split.
        """
        same = (ranks, accumulate) == (self.ranks, self.accumulate)
        if not same and carry:
            raise DataError(CARRIED)
        if ranks != self.ranks:
            _check_order(loader, self.ranks, ranks)
        elif self.start is not None:
            set_host_randomness(self.start.host)
            set_generator_states(generators_of(loader), self.start.own)
        done = self.micro_batches if same else self.windows * accumulate
        skip = skip_of(loader)
        if skip is not None:
            skip(done)
            done = 0
        batches: Iterator[Any] = iter(loader)
        for _ in range(done):
            next(batches, None)
        if self.ahead is not None and same:
            set_host_randomness(self.ahead)
        return batches

    def settle(self, loader: Any) -> None:
        """Put the loader's own generators where they stood; called when as much has been read as then."""
        generators = generators_of(loader)
        if len(generators) == len(self.own):
            set_generator_states(generators, self.own)


def skip_of(loader: Any) -> Callable[[int], object] | None:
    """What makes the loader leave out micro-batches, where it can."""
    skips = [getattr(part, "skip", None) for part in (loader, getattr(loader, "batch_sampler", None))]
    return next(filter(callable, skips), None)


def draws_here(loader: Any) -> bool:
    """Whether reading the loader may draw random numbers in this process, between those that the model draws."""
    return not isinstance(loader, (list, tuple)) and not getattr(loader, "num_workers", 0) and skip_of(loader) is None


def start_of(loader: Any) -> Start:
    """The generators as they are, before an epoch is read."""
    return Start(host=host_randomness(), own=generator_states(generators_of(loader)))


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers bring, each once."""
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    parts = [loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
    found = [getattr(part, "generator", None) for part in parts]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _check_order(loader: Any, before: int, now: int) -> None:
    """See that another number of ranks reads the same windows."""
    if isinstance(getattr(loader, "sampler", None), RandomSampler):
        raise DataError(
            f"The checkpoint was made by {before} {'rank' if before == 1 else 'ranks'} and the run has {now}: the loader draws "
            "its order by itself, so that the same samples would not come again. Give it a sampler or batch sampler whose order "
            "is a function of the epoch (`set_epoch`)."
        )
