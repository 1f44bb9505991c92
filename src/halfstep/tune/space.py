"""What a search may choose from: what the configuration leaves open, in the order in which it is tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.bench.describing import Subject
from halfstep.bench.row import Row
from halfstep.config.decisions import is_auto
from halfstep.config.options import Precision, Sharding
from halfstep.config.schema import Written

START_SHARE = 4
"""The search starts at this part of the micro-batch that `train` would take, which is no measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The values of each key; one alone where the configuration or the machine has decided.

    Attributes:
        share: samples of an update on one rank.
        processes: ranks.
        micros: micro-batches, each at least twice the one before.
        start: the one that is tried first.
        precisions: the simplest first.
        shardings: that which divides least first.
        checkpoints: whether blocks are computed again.
        compiles: whether blocks are compiled.
        settled: by key, why there is but one value.
    """

    share: int
    processes: int
    micros: tuple[int, ...]
    start: int
    precisions: tuple[Precision, ...]
    shardings: tuple[Sharding, ...]
    checkpoints: tuple[bool, ...]
    compiles: tuple[bool, ...]
    settled: Mapping[str, str]

    def row(self, micro: int, precision: Precision, sharding: Sharding, *, checkpoint: bool, compile: bool) -> Row:
        """The way to make the update with these values."""
        return Row(
            precision=precision,
            micro=micro,
            accumulate=self.share // micro,
            compile=compile,
            checkpoint=checkpoint,
            sharding=sharding,
            processes=self.processes,
        )

    def simplicity(self, row: Row) -> tuple[int, ...]:
        """The lower, the less there is to go wrong: compiled, recomputed, divided, rounded, and how large at a time."""
        assert row.sharding is not None
        ranks = (self.shardings.index(row.sharding), self.precisions.index(row.precision))
        return (int(row.compile), int(bool(row.checkpoint)), *ranks, row.micro)


def space_of(written: Written, subject: Subject) -> Space:
    """What the configuration leaves open: keys that are absent or "auto"."""
    settled: dict[str, str] = {}

    def open_to(key: str, asked: Any, values: tuple[Any, ...], alone: str) -> tuple[Any, ...]:
        if not is_auto(asked):
            settled[key] = 'the configuration says so; "auto" leaves it to the search'
            return (asked,)
        if len(values) == 1:
            settled[key] = alone
        return values

    share = subject.micro * subject.accumulate
    micros = open_to("batch.micro", written.batch.micro, doubling(share), "an update is one sample on each rank")
    native = tuple(Precision(name) for name in subject.native)
    many = (Sharding.DDP, Sharding.ZERO2, Sharding.ZERO3)
    ranks = many if subject.processes > 1 else (Sharding.NONE,)
    return Space(
        share=share,
        processes=subject.processes,
        micros=micros,
        start=max((micro for micro in micros if micro <= max(1, subject.micro // START_SHARE)), default=micros[0]),
        precisions=open_to("precision", written.precision, native, "this device has instructions for no other"),
        shardings=open_to("sharding", written.sharding, ranks, "one process has nothing to divide"),
        checkpoints=open_to("model.checkpoint_activations", written.model.checkpoint_activations, (False, True), ""),
        compiles=open_to("model.compile", written.model.compile, (False, True), ""),
        settled=settled,
    )


def doubling(share: int) -> tuple[int, ...]:
    """Divisors of `share` from 1 up to it, each at least twice the one before."""
    found = [1]
    for size in range(2, share + 1):
        if share % size == 0 and size >= 2 * found[-1]:
            found.append(size)
    return tuple(found)
