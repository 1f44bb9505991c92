"""From a loader to windows of micro-batches, read one ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from halfstep.config.choice import Choice
from halfstep.config.options import Tail
from halfstep.distributed import Group
from halfstep.distributed.group import Vote
from halfstep.distributed.sharing import seed_of, share_out
from halfstep.engine.position import Position, Start, draws_here, generators_of, start_of
from halfstep.engine.randomness import HostStates, generator_states, host_randomness, host_states
from halfstep.errors import DataError

_END = object()
NO_MICRO_BATCH = (
    "no micro-batch; training needs at least one. Is the data set empty, smaller than a batch with `drop_last=True`, or an "
    "iterator that has been read already?"
)

Feed = Iterator[tuple[Any, bool]]
"""Micro-batches of one window, each with whether it is the last one of this rank in the window."""


def read_ahead(batches: Iterable[Any]) -> Feed:
    """Each batch, with whether it is the last."""
    source = iter(batches)
    ahead = next(source, _END)
    while ahead is not _END:
        batch, ahead = ahead, next(source, _END)
        yield batch, ahead is _END


def set_epoch(loader: Any, epoch: int) -> bool:
    """Tell sampler, batch sampler (and its sampler) and dataset which epoch begins; whether one of them listens."""
    parts = [getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")]
    inner = getattr(parts[1], "sampler", None)
    listeners = [loader, *parts, *([] if inner is parts[0] else [inner])]
    told = [listener.set_epoch(epoch) for listener in listeners if callable(getattr(listener, "set_epoch", None))]
    return bool(told)


class Reader:
    """Reads a loader epoch by epoch, in windows.

    Args:
        size: micro-batches in a full window.
        tail: what becomes of an epoch's last window when it is not full.
        group: the ranks that share the windows.
    """

    def __init__(self, size: int, tail: Tail, group: Group) -> None:
        self._size, self._tail, self._group = size, tail, group
        self.epoch = 0
        """Number of the epoch that is read, or is read next."""
        self.choices: dict[str, Choice[Any]] = {"tail": _TAIL_CHOICES[tail]}
        """What was decided about tail and sampler, with reasons."""
        self._reading: _Reading | None = None
        self._place: Position | None = None

    def windows(
        self, loader: Iterable[Any], epochs: int | None, restore: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[Feed, bool]]:
        """Each window's feed, with whether every rank has micro-batches in it.

        Args:
            loader: yields micro-batches.
            epochs: passes over it; None for no end.
            restore: puts the random generators where they stood in the checkpoint that the run goes on from.

        Raises:
            DataError: an epoch yields no micro-batch on any rank.
        """
        place, self._place = self._place, None
        began = self.epoch if place is None else place.began
        end = None if epochs is None else began + epochs
        carry = self._tail is Tail.CARRY
        seed = self._seed(loader, place)
        reading = self._reading = _Reading(loader=self._shared(loader, seed), began=began, seed=seed, carry=carry)
        readings = self._readings(reading, end, place, restore)
        for batches in [_joined(readings, reading)] if carry else readings:
            windows = reading.windows = Windows(batches, self._size, self._tail, self._group, draws=draws_here(reading.loader))
            windows.begin()
            if place is not None and place.start is not None:
                reading.resumed(place, restore)
            place = None
            try:
                yield from windows
            finally:
                windows.release()
            has_some = windows.read > 0 and (not carry or self.epoch == end)
            require_any(loader, self._group, has_some=has_some, found=self._found_nothing)
        self._reading = None

    def _seed(self, loader: Iterable[Any], place: Position | None) -> int | None:
        """What decides the order of a loader that is shared out; None where one rank reads it as it is."""
        if place is not None and place.seed is not None:
            return place.seed
        return None if self._group.alone else self._group.from_first(seed_of(loader))

    def _shared(self, loader: Iterable[Any], seed: int | None) -> Iterable[Any]:
        if seed is None:
            return loader
        loader, self.choices["sampler"] = share_out(loader, self._group.rank, self._group.size, seed=seed)
        return loader

    def _readings(
        self, reading: _Reading, end: int | None, place: Position | None, restore: Callable[[], None]
    ) -> Iterator[Iterator[Any]]:
        while end is None or self.epoch < end:
            set_epoch(reading.loader, self.epoch)
            if place is None or place.start is None:
                if place is not None:
                    reading.resumed(place, restore)
                reading.start = start_of(reading.loader)
                yield iter(reading.loader)
            else:
                reading.start = place.start
                yield place.reopen(reading.loader, accumulate=self._size, ranks=self._group.size, carry=reading.carry)
            place = None
            self.epoch += 1

    def position(self) -> Position:
        """Where the data stand after an update; every rank calls it."""
        if self._place is not None:
            return self._place
        if self._reading is not None and self._reading.windows is not None:
            return self._reading.position(self.epoch, self._group.size, self._size)
        return Position(
            began=self.epoch, epoch=self.epoch, windows=0, micro_batches=0, ranks=self._group.size, accumulate=self._size
        )

    def go_to(self, place: Position) -> None:
        """Begin the next call of `windows` at a position."""
        self.epoch, self._place = place.epoch, place

    @property
    def _found_nothing(self) -> str:
        if self._tail is not Tail.DROP:
            return NO_MICRO_BATCH
        return (
            f'fewer than the {self._size} micro-batches of a window, and `tail = "drop"` leaves shorter ones out. '
            'Use "step" or "carry", or a smaller `accumulate`.'
        )


@dataclass(slots=True, kw_only=True)
class _Reading:
    """One call of `windows`, as far as it has come.

    Attributes:
        loader: this rank's.
        began: the epoch that it began with.
        seed: what decides the order of a loader that is shared out.
        carry: whether the windows go on from one epoch into the next.
        start: how the present epoch began.
        windows: those of the present epoch, or with `carry` of all.
        before: micro-batches in `windows` of epochs that are over.
    """

    loader: Iterable[Any]
    began: int
    seed: int | None
    carry: bool
    start: Start | None = None
    windows: Windows | None = None
    before: int = 0

    def resumed(self, place: Position, restore: Callable[[], None]) -> None:
        """Put generators and counts where they stood."""
        place.settle(self.loader)
        restore()
        if self.windows is not None:
            self.windows.read, self.windows.given = place.micro_batches, place.windows

    def position(self, epoch: int, ranks: int, accumulate: int) -> Position:
        """Where the data stand between two windows, of which `epoch` is the present one."""
        assert self.windows is not None
        place = Position(
            began=self.began,
            epoch=epoch,
            windows=self.windows.given,
            micro_batches=self.windows.read - self.before,
            ranks=ranks,
            accumulate=accumulate,
            seed=self.seed,
            start=self.start,
            ahead=None if self.windows.drawn is None else host_randomness(self.windows.drawn),
            own=generator_states(generators_of(self.loader)),
        )
        if not self.windows.is_over:
            return place
        return replace(place, epoch=epoch + (not self.carry), windows=0, micro_batches=0, start=None, ahead=None)


class Windows:
    """The windows of one epoch, the same number on every rank.

    Ranks vote, one window ahead and while the last micro-batch is computed, on whether anybody has data left. A rank that has
    none takes part in the window with an empty feed.

    Args:
        batches: the micro-batches of this rank.
        size: micro-batches in a full window.
        tail: what becomes of a last window that is not full; `CARRY` is the caller's, who joins epochs.
        group: the ranks that share the windows.
        draws: whether reading draws random numbers in this process.
    """

    def __init__(self, batches: Iterator[Any], size: int, tail: Tail, group: Group, *, draws: bool) -> None:
        self._batches = _full_windows(batches, size) if tail is Tail.DROP else batches
        self._size, self._group, self._draws = size, group, draws
        self.drawn: HostStates | None = None
        """The host's generators before the next window's first micro-batch was read, where reading may draw."""
        self._ahead: Any = _END
        self._vote: Vote | None = None
        self.read = 0
        """Micro-batches given out so far."""
        self.given = 0
        """Windows given out so far."""

    def begin(self) -> None:
        """Read the first micro-batch, before the windows are asked for; every rank calls it."""
        self._read_next()
        self._cast_vote()

    def release(self) -> None:
        """Let go of the loader's iterator, and so of its workers; what was counted stays."""
        self._batches = iter(())

    @property
    def is_over(self) -> bool:
        """Whether no rank has micro-batches left; asked between two windows."""
        return not self._counted()[0]

    def __iter__(self) -> Iterator[tuple[Feed, bool]]:
        """Each window's feed, with whether every rank has micro-batches in it."""
        while True:
            anybody, nobody_is_missing = self._counted()
            if not anybody:
                return
            self.given += 1
            yield self._feed(), nobody_is_missing

    def _feed(self) -> Feed:
        for position in range(1, self._size + 1):
            if self._ahead is _END:
                self._cast_vote()
                return
            batch = self._ahead
            if self._draws and position == self._size:
                self.drawn = host_states()
            self._read_next()
            self.read += 1
            last = position == self._size or self._ahead is _END
            if last:
                self._cast_vote()
            yield batch, last
            if last:
                return

    def _read_next(self) -> None:
        self._ahead = next(self._batches, _END)

    def _cast_vote(self) -> None:
        has = self._ahead is not _END
        self._vote = None if self._group.alone else self._group.cast(has, not has)

    def _counted(self) -> tuple[bool, bool]:
        if self._vote is None:
            return self._ahead is not _END, True
        anybody, somebody_is_missing = self._group.count(self._vote)
        return anybody, not somebody_is_missing


def _full_windows(batches: Iterator[Any], size: int) -> Iterator[Any]:
    while len(window := list(islice(batches, size))) == size:
        yield from window


def _joined(readings: Iterator[Iterator[Any]], reading: _Reading) -> Iterator[Any]:
    """The epochs as one, up to the first that yields nothing: others would follow without end."""
    for batches in readings:
        first = next(batches, _END)
        if first is _END:
            return
        yield first
        yield from batches
        assert reading.windows is not None
        reading.before = reading.windows.read + 1  # the one that is being given out while this one is looked for


def require_any(source: Any, group: Group, *, has_some: bool, found: str = NO_MICRO_BATCH) -> bool:
    """See that some rank has micro-batches; whether every rank has. Every rank calls it.

    Args:
        found: what the source yielded instead, and what to do about it.

    Raises:
        DataError: no rank has any.
    """
    anybody, somebody_is_missing = group.max(float(has_some), float(not has_some))
    if not anybody:
        raise DataError(f"The {type(source).__name__} yielded {found}")
    return not somebody_is_missing


_TAIL_CHOICES: dict[Tail, Choice[Any]] = {
    Tail.STEP: Choice(value=Tail.STEP, reason="a shorter last window of an epoch is an update of its own, exactly weighted"),
    Tail.CARRY: Choice(value=Tail.CARRY, reason="asked for: an epoch's last micro-batches begin the next epoch's first window"),
    Tail.DROP: Choice(value=Tail.DROP, reason="asked for: an epoch's last micro-batches are not used unless they fill a window"),
}
