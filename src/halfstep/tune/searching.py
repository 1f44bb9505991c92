"""The search: from a small micro-batch up, then precision, then recomputing where memory was short, then compiling.

A single trial decides what to try next. Which way is taken, rounds of the best few decide, with their spread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from halfstep.bench.benching import ROUNDS, Result, compare
from halfstep.bench.row import Row, Trial, size_text
from halfstep.errors import ConfigError, DeviceError
from halfstep.tune.space import Space

GAIN = 1.03
"""A micro-batch twice as large that gains less than this ends the doubling: single trials differ by as much."""
FINALISTS = 3
TOO_BIG = 1.1
"""A prediction so many times the memory at hand is taken for an answer; nine in ten are nearer to the truth."""

SHORT = ("does not fit", "not safe")
"""How a refusal begins where memory was the reason."""

Measure = Callable[[Sequence[Row], int], Mapping[Row, Sequence[Trial]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a way may take of the memory.

    Attributes:
        at_hand_bytes: what nobody uses, for each rank; None where that is not told.
        margin: the share of it that must be left.
        predicted: what `halfstep plan` says of a row; None where it cannot.
    """

    at_hand_bytes: int | None
    margin: float
    predicted: Callable[[Row], int | None]

    @property
    def limit_bytes(self) -> float | None:
        """What a way may take at most."""
        return None if self.at_hand_bytes is None else (1 - self.margin) * self.at_hand_bytes

    def foreseen(self, row: Row) -> str | None:
        """Why the row need not be tried."""
        size = self.predicted(row)
        if size is None or self.at_hand_bytes is None or size <= TOO_BIG * self.at_hand_bytes:
            return None
        return f"does not fit: {size_text(size)} predicted, {size_text(self.at_hand_bytes)} at hand; not run"

    def exceeded(self, result: Result) -> str | None:
        """Why a row that ran is not safe."""
        size, limit = taken_bytes(result), self.limit_bytes
        if size is None or limit is None or size <= limit:
            return None
        left = f"{self.margin:.0%} of {size_text(self.at_hand_bytes or 0)}"
        return f"not safe: {size_text(size)} measured, which leaves less than {left}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What became of one way.

    Attributes:
        result: what one trial measured; without a rate where it was not run or failed.
        refused: why it cannot be taken; None where it can.
    """

    result: Result
    refused: str | None

    @property
    def row(self) -> Row:
        """The way."""
        return self.result.row

    @property
    def rate(self) -> float:
        """What counted, a second; 0 where it cannot be taken."""
        return 0.0 if self.refused or self.result.rate is None else self.result.rate.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The end of a search.

    Attributes:
        attempts: everything that was tried, in order.
        finals: the best few over rounds, against the fastest of them; the fastest first.
        winner: what is taken.
        because: why this one.
    """

    attempts: Sequence[Attempt]
    finals: Sequence[Result]
    winner: Row
    because: str


class Search:
    """One search.

    Args:
        space: what may be chosen.
        memory: what is safe.
        measure: the trials of rows in so many rounds.
    """

    def __init__(self, space: Space, memory: Memory, measure: Measure) -> None:
        self._space, self._memory, self._measure = space, memory, measure
        self._attempts: dict[Row, Attempt] = {}
        self._trials: dict[Row, Sequence[Trial]] = {}
        self._short = False

    def run(self, rounds: int) -> Found:
        """Search, and decide between the best.

        Raises:
            DeviceError: no way that was tried is safe.
        """
        best = self._first_that_fits()
        best = self._precise(best)
        best = self._recomputed(best)
        self._compiled(best)
        return self._decide(rounds)

    def _first_that_fits(self) -> Attempt:
        """The fastest micro-batch of the first sharding and recomputing with which any is safe."""
        space = self._space
        for sharding, checkpoint in product(space.shardings, space.checkpoints):
            row = space.row(space.start, space.precisions[0], sharding, checkpoint=checkpoint, compile=space.compiles[0])
            best = self._grown(self._shrunk(row))
            if best.refused is None:
                return best
        raise DeviceError(self._nothing_is_safe())

    def _nothing_is_safe(self) -> str:
        """With the last way for which memory was short; with the last of all where it was not."""
        tried = list(self._attempts.values())
        last = next((each for each in reversed(tried) if (each.refused or "").startswith(SHORT)), tried[-1])
        return f"No way to make this update is safe here: {last.row} {(last.refused or '').rstrip('.')}."

    def _shrunk(self, row: Row) -> Attempt:
        """The row, or the largest smaller micro-batch that is safe."""
        tried = self._try(row)
        for micro in reversed([micro for micro in self._space.micros if micro < row.micro]):
            if tried.refused is None:
                break
            tried = self._try(self._with(row, micro=micro))
        return tried

    def _grown(self, best: Attempt) -> Attempt:
        """The fastest from here on by doubling, until memory is short or nothing is gained."""
        for micro in [micro for micro in self._space.micros if micro > best.row.micro]:
            if best.refused is not None:
                break
            larger = self._try(self._with(best.row, micro=micro))
            self._short = (larger.refused or "").startswith(SHORT)
            if larger.rate <= best.rate:
                break
            gain, best = larger.rate / best.rate, larger
            if gain < GAIN:
                break
        return best

    def _precise(self, best: Attempt) -> Attempt:
        """Each other precision where the first was best, and on from there."""
        for precision in self._space.precisions[1:]:
            other = self._try(replace(best.row, precision=precision))
            if other.rate > best.rate:
                best = self._grown(other)
        return best

    def _recomputed(self, best: Attempt) -> Attempt:
        """Recomputing, where memory was what ended the doubling."""
        larger = [micro for micro in self._space.micros if micro > best.row.micro]
        if not self._short or best.row.checkpoint or True not in self._space.checkpoints or not larger:
            return best
        other = self._try(replace(self._with(best.row, micro=larger[0]), checkpoint=True))
        return max(best, self._grown(other), key=lambda attempt: attempt.rate)

    def _compiled(self, best: Attempt) -> None:
        if not best.row.compile and True in self._space.compiles:
            self._try(replace(best.row, compile=True))

    def _decide(self, rounds: int) -> Found:
        """The fastest of the best few, over rounds; the simplest of those that it does not beat beyond the spread.

        One round is what the search has measured already.
        """
        usable = sorted((attempt for attempt in self._attempts.values() if attempt.rate > 0), key=lambda each: -each.rate)
        rows = [attempt.row for attempt in usable[:FINALISTS]]
        trials = {row: self._trials[row] for row in rows} if rounds == 1 else self._measure(rows, rounds)
        safe = [result for result in compare(trials, rows[0]) if self._refusal(result) is None]
        if not safe:
            raise DeviceError(f"No way to make this update is safe here: {rows[0]} was, once, and then no more.")
        leader = max(safe, key=_rate).row
        finals = sorted(compare({result.row: trials[result.row] for result in safe}, leader), key=_rate, reverse=True)
        winner, because = decide(finals, self._space)
        return Found(attempts=list(self._attempts.values()), finals=finals, winner=winner, because=because)

    def _try(self, row: Row) -> Attempt:
        if row not in self._attempts:
            result = self._result(row)
            self._attempts[row] = Attempt(result=result, refused=self._refusal(result))
        return self._attempts[row]

    def _result(self, row: Row) -> Result:
        foreseen = self._memory.foreseen(row)
        if foreseen is not None:
            return Result(row=row, failed=foreseen)
        try:
            measured = self._measure([row], 1)
        except ConfigError as error:
            if not self._attempts:  # then it is not the row that is wrong
                raise
            return Result(row=row, failed=f"cannot be run: {error}")
        self._trials |= measured
        return compare(measured, row)[0]

    def _refusal(self, result: Result) -> str | None:
        return result.failed or self._memory.exceeded(result)

    def _with(self, row: Row, *, micro: int) -> Row:
        return replace(row, micro=micro, accumulate=self._space.share // micro)


def decide(finals: Sequence[Result], space: Space) -> tuple[Row, str]:
    """Which of the best few is taken, and why.

    Args:
        finals: against the fastest of them, which comes first.
        space: knows which are simpler.
    """
    first, *others = finals
    if not others:
        return first.row, "the only way that ran and is safe"
    runner_up = others[0]
    assert runner_up.against is not None
    told = f"{runner_up.row} reaches {runner_up.against} of its rate"
    if runner_up.against.count < ROUNDS:
        return (
            first.row,
            f"the fastest, though {runner_up.against.count} of {ROUNDS} rounds do not tell a gain from noise: {told}",
        )
    equal = [result.row for result in others if result.verdict != "slower"]
    if not equal:
        return first.row, f"the fastest beyond the spread: {told}"
    taken = min([first.row, *equal], key=space.simplicity)
    beside = ", ".join(str(row) for row in [first.row, *equal] if row != taken)
    return taken, f"no difference beyond the spread from {beside}: the simpler is taken ({told})"


def taken_bytes(result: Result) -> int | None:
    """What a row took of the device at most: what its allocator reserved, where there is one."""
    return result.allocated_bytes if result.reserved_bytes is None else result.reserved_bytes


def _rate(result: Result) -> float:
    return 0.0 if result.rate is None else result.rate.value
