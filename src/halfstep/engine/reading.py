"""From a loader to windows of micro-batches, read one ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from halfstep.config.choice import Choice
from halfstep.config.options import Tail
from halfstep.distributed import Group
from halfstep.distributed.group import Pending
from halfstep.distributed.sharing import seed_of, share_out
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

    def windows(self, loader: Iterable[Any], epochs: int | None) -> Iterator[tuple[Feed, bool]]:
        """Each window's feed, with whether every rank has micro-batches in it.

        Raises:
            DataError: an epoch yields no micro-batch on any rank.
        """
        end = None if epochs is None else self.epoch + epochs
        carry = self._tail is Tail.CARRY
        readings = self._readings(self._shared(loader), end)
        for batches in [_joined(readings)] if carry else readings:
            windows = Windows(batches, self._size, self._tail, self._group)
            yield from windows
            has_some = windows.read > 0 and (not carry or self.epoch == end)
            require_any(loader, self._group, has_some=has_some, found=self._found_nothing)

    def _shared(self, loader: Iterable[Any]) -> Iterable[Any]:
        if self._group.alone:
            return loader
        seed = self._group.from_first(seed_of(loader))
        loader, self.choices["sampler"] = share_out(loader, self._group.rank, self._group.size, seed=seed)
        return loader

    def _readings(self, loader: Iterable[Any], end: int | None) -> Iterator[Iterator[Any]]:
        while end is None or self.epoch < end:
            set_epoch(loader, self.epoch)
            yield iter(loader)
            self.epoch += 1

    @property
    def _found_nothing(self) -> str:
        if self._tail is not Tail.DROP:
            return NO_MICRO_BATCH
        return (
            f'fewer than the {self._size} micro-batches of a window, and `tail = "drop"` leaves shorter ones out. '
            'Use "step" or "carry", or a smaller `accumulate`.'
        )


class Windows:
    """The windows of one epoch, the same number on every rank.

    Ranks vote, one window ahead and while the last micro-batch is computed, on whether anybody has data left. A rank that has
    none takes part in the window with an empty feed.

    Args:
        batches: the micro-batches of this rank.
        size: micro-batches in a full window.
        tail: what becomes of a last window that is not full; `CARRY` is the caller's, who joins epochs.
        group: the ranks that share the windows.
    """

    def __init__(self, batches: Iterator[Any], size: int, tail: Tail, group: Group) -> None:
        self._batches = _full_windows(batches, size) if tail is Tail.DROP else batches
        self._size, self._group = size, group
        self._ahead: Any = _END
        self._vote: Pending | None = None
        self.read = 0
        """Micro-batches given out so far."""

    def __iter__(self) -> Iterator[tuple[Feed, bool]]:
        """Each window's feed, with whether every rank has micro-batches in it."""
        self._read_next()
        self._cast_vote()
        while True:
            anybody, nobody_is_missing = self._counted()
            if not anybody:
                return
            yield self._feed(), nobody_is_missing

    def _feed(self) -> Feed:
        for position in range(1, self._size + 1):
            if self._ahead is _END:
                self._cast_vote()
                return
            batch = self._ahead
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
        has = float(self._ahead is not _END)
        self._vote = None if self._group.alone else self._group.start_max([has, 1.0 - has])

    def _counted(self) -> tuple[bool, bool]:
        if self._vote is None:
            return self._ahead is not _END, True
        anybody, somebody_is_missing = self._vote.wait().tolist()
        return bool(anybody), not somebody_is_missing


def _full_windows(batches: Iterator[Any], size: int) -> Iterator[Any]:
    while len(window := list(islice(batches, size))) == size:
        yield from window


def _joined(readings: Iterator[Iterator[Any]]) -> Iterator[Any]:
    """The epochs as one, up to the first that yields nothing: others would follow without end."""
    for batches in readings:
        first = next(batches, _END)
        if first is _END:
            return
        yield first
        yield from batches


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
