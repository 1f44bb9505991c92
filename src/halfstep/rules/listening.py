"""What several rules need to hear: which gradients an optimizer holds, and how its windows run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import (
    Backward,
    Clip,
    EpochBegin,
    EpochEnd,
    Event,
    Place,
    Ref,
    RunEnd,
    ScalerUpdate,
    Step,
    Turn,
    Unscale,
    ZeroGrad,
)
from halfstep.findings.finding import FixRequest


@dataclass(slots=True)
class Account:
    """What one optimizer's gradients hold at a moment."""

    pending: list[Backward] = field(default_factory=list)
    """Backward passes since the last step or clearing."""
    held: list[Backward] = field(default_factory=list)
    """Backward passes since the last clearing, stepped or not."""
    unscaled: Unscale | None = None
    """The unscale since the last update, step or clearing."""
    not_updated: Event | None = None
    """An unscale or scaled step since the scaler's last update."""
    step: Step | None = None
    zero: ZeroGrad | None = None
    clip: Clip | None = None

    @property
    def scaled(self) -> bool:
        """Whether the gradients are multiplied by a loss scale now."""
        return any(b.scaler is not None for b in self.pending) and self.unscaled is None


Accounts = dict[Ref, Account]


def hear(trace: Trace) -> Iterator[tuple[Event, Accounts]]:
    """Every event with the accounts as they are just before it."""
    accounts: Accounts = {}
    for event in trace.events if trace.has(Backward, Unscale) else ():
        for optimizer in concerned(event):
            accounts.setdefault(optimizer, Account())
        yield event, accounts
        _book(event, accounts)


def concerned(event: Event) -> tuple[Ref, ...]:
    """The optimizers that an event concerns."""
    if isinstance(event, (Backward, Clip, ZeroGrad)):
        return event.optimizers
    return (event.optimizer,) if isinstance(event, (Step, Unscale)) else ()


def _book(event: Event, accounts: Accounts) -> None:
    for optimizer in concerned(event):
        account = accounts[optimizer]
        if isinstance(event, Backward):
            account.pending.append(event)
            account.held.append(event)
        elif isinstance(event, Unscale):
            account.unscaled = account.not_updated = event
        elif isinstance(event, Clip):
            account.clip = event
        elif isinstance(event, Step):
            account.pending, account.unscaled, account.step = [], None, event
            account.not_updated = event if event.scaler is not None else account.not_updated
        elif isinstance(event, ZeroGrad):
            account.pending, account.held, account.unscaled, account.zero = [], [], None, event
    if isinstance(event, ScalerUpdate):
        for account in accounts.values():
            if account.not_updated is not None and getattr(account.not_updated, "scaler", None) == event.scaler:
                account.not_updated = None
            account.unscaled = account.unscaled if account.pending and account.unscaled is not None else None


@dataclass(slots=True)
class Window:
    """The backward passes between two steps of an optimizer."""

    backwards: list[Backward]
    step: Step | None
    epoch: int
    wiped: bool = False
    crossed: bool = False
    """Holds micro-batches of two epochs."""

    @property
    def size(self) -> int:
        """Micro-batches: how often its most frequent backward line ran."""
        counts = Counter(b.stack for b in self.backwards)
        return max(counts.values(), default=0)


@lru_cache(maxsize=512)
def windows(trace: Trace, optimizer: Ref) -> list[Window]:
    """The windows of an optimizer in order; the last may have no step."""
    found: list[Window] = []
    open_window = Window([], None, 0)
    epoch = 0
    for event in trace.of(EpochBegin, Backward, ZeroGrad, Step, RunEnd):
        if isinstance(event, EpochBegin):
            epoch += 1
            open_window.crossed = open_window.crossed or _left(open_window.backwards[-1:], event)
        elif isinstance(event, Backward) and optimizer in event.optimizers:
            open_window.backwards.append(event)
            open_window.epoch = epoch
        elif isinstance(event, ZeroGrad) and optimizer in event.optimizers and open_window.backwards:
            open_window.wiped = True
            found.append(open_window)
            open_window = Window([], None, epoch)
        elif isinstance(event, Step) and event.optimizer == optimizer:
            open_window.step = event
            found.append(open_window)
            open_window = Window([], None, epoch)
        elif isinstance(event, RunEnd) and open_window.backwards:
            found.append(open_window)
    return found


def _left(last: list[Backward], event: EpochBegin) -> bool:
    """Whether the loop of the last backward pass is over when another one begins."""
    return any(not b.loops or b.loops[-1].loop not in {turn.loop for turn in event.loops} for b in last)


def optimizers(trace: Trace) -> list[Ref]:
    """The optimizers that step, in order of their first step."""
    return list(dict.fromkeys(step.optimizer for step in trace.of(Step)))


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How an optimizer accumulates: `size` micro-batches a window, usually."""

    size: int
    guarded: bool
    """The step stands in the loop over micro-batches and is left out in most turns (else: a loop inside a loop)."""
    wiped: bool
    """The gradients are cleared for every micro-batch."""
    counted: bool = False
    """The loop over micro-batches counts to the window's size (`for _ in range(accumulate)`) or runs over a part of all."""


WINDOW = frozenset({"accum", "part"})
"""What a loop over the micro-batches of one window counts, or runs over."""


@lru_cache(maxsize=512)
def accumulation(trace: Trace, optimizer: Ref) -> Accumulation | None:
    """How an optimizer accumulates gradients over micro-batches, or None where it steps after each or gets sums made by hand."""
    parts = windows(trace, optimizer)
    stepped = [w for w in parts if w.step is not None and w.backwards]
    if not stepped or _sets_gradients(trace, optimizer):
        return None
    last = [w.backwards[-1] for w in stepped]
    guarded = any(_same_loop(w.backwards[-1], w.step) for w in stepped)
    counted = any(b.loops and b.loops[-1].tags & WINDOW for b in last)
    sizes = Counter(w.size for w in stepped)
    size = max(sizes, key=lambda s: (s * sizes[s], s))
    wiped = False
    if size == 1:
        size, wiped = _skipping(trace, optimizer, stepped)
    divided = any(d.value == size for b in last for d in b.divisors)
    if size < 2 or not (guarded or divided or (_by_name(stepped) and (counted or not wiped))):
        return None
    return Accumulation(size, guarded, wiped, counted)


def _skipping(trace: Trace, optimizer: Ref, stepped: list[Window]) -> tuple[int, bool]:
    stack = stepped[0].backwards[-1].stack
    turns = [b for b in trace.of(Backward) if b.stack == stack and optimizer in b.optimizers]
    steps = [s for s in trace.of(Step) if s.optimizer == optimizer]
    stepping = {s.loops for s in trace.of(Step)}
    if max(len(steps), len(stepping)) >= len(turns) or not any(w.wiped for w in windows(trace, optimizer)):
        return 1, False
    gaps = Counter(_between(turns, a, b) for a, b in itertools.pairwise([None, *steps]) if b is not None)
    size = max(gaps, key=lambda s: (gaps[s], s), default=1)
    return size, True


def _between(turns: list[Backward], a: Step | None, b: Step) -> int:
    return sum((a is None or a.serial < turn.serial) and turn.serial < b.serial for turn in turns)


def _same_loop(backward: Backward, step: Step | None) -> bool:
    if step is None or not backward.loops or len(step.loops) < len(backward.loops):
        return False
    return step.loops[len(backward.loops) - 1] == backward.loops[-1]


def _by_name(stepped: list[Window]) -> bool:
    for window in stepped:
        turn = window.backwards[-1].loops[-1] if window.backwards[-1].loops else None
        if turn is not None and (turn.tags & WINDOW or turn.over == "loader"):
            return True
        if any("accum" in d.tags for d in window.backwards[-1].divisors):
            return True
    return False


def same_turn(a: Event, b: Event) -> bool:
    """Whether two events happened in the same turn of the innermost loop around the shallower of them."""
    depth = min(len(a.loops), len(b.loops))
    return a.loops[:depth] == b.loops[:depth]


def call_site(event: Event, other: Event | None) -> Place | None:
    """Where `event` was caused, in the function that also leads to `other`."""
    if other is None:
        return event.place
    depth = 0
    for mine, theirs in zip(event.stack, other.stack, strict=False):
        if mine != theirs:
            break
        depth += 1
    return event.stack[min(depth, len(event.stack) - 1)] if event.stack else event.place


def in_loader_loop(event: Event) -> bool:
    """Whether an event happens once a micro-batch: inside a loop over batches."""
    return any(turn.over == "loader" for turn in event.loops)


def alike(ref: Ref) -> tuple[object, ...]:
    """What makes an object the same one in another world, where numbers may differ."""
    return (ref.kind, ref.name, ref.place)


def cleared_in(trace: Trace) -> set[Ref]:
    """The optimizers whose gradients are cleared between a backward pass and a later step."""
    begun: set[Ref] = set()
    emptied: set[Ref] = set()
    found: set[Ref] = set()
    for event in trace.of(Backward, ZeroGrad, Step):
        if isinstance(event, Backward):
            begun.update(event.optimizers)
        elif isinstance(event, ZeroGrad):
            emptied |= begun.intersection(event.optimizers)
        elif event.optimizer in emptied:
            found.add(event.optimizer)
    return found


def used_again(trace: Trace, optimizer: Ref) -> tuple[Backward, bool] | None:
    """The first gradients that were added to those of a step before, if that happens often; whether a branch clears them."""
    again: list[tuple[Step, Backward]] = []
    clearings: list[ZeroGrad] = []
    for event, accounts in hear(trace):
        if isinstance(event, ZeroGrad) and optimizer in event.optimizers:
            clearings.append(event)
        elif isinstance(event, Step) and event.optimizer == optimizer and not event.closure:
            account = accounts[optimizer]
            before = account.step
            if before is not None and account.pending and account.held[0].serial < before.serial and before.stack == event.stack:
                again.append((event, account.pending[0]))
    if len(again) < 2:
        return None
    loops = {tuple(turn.loop for turn in step.loops) for step, _ in again}
    within = any(tuple(turn.loop for turn in zero.loops)[: len(run)] == run for zero in clearings for run in loops)
    return again[0][1], within


def cleared(story: Story, root: str) -> set[tuple[object, ...]]:
    """What makes the optimizers alike that are cleared after a backward pass in some world of this root."""
    return {alike(o) for trace in story.traces if trace.root == root for o in cleared_in(trace)}


def all_step(trace: Trace, backward: Backward) -> bool:
    """Whether no optimizer that may hold these gradients is cleared before it steps: what it holds is trained by them."""
    left = set(backward.optimizers)
    for event in trace.of(Step, ZeroGrad):
        if event.serial < backward.serial:
            continue
        if isinstance(event, Step):
            left.discard(event.optimizer)
        elif left.intersection(event.optimizers):
            return False
    return True


def known_to_clear(trace: Trace, story: Story, optimizer: Ref) -> bool:
    """Whether some path clears an optimizer's gradients; where one line makes several, only what was heard of itself counts."""
    made = trace.made(optimizer)
    others = (trace.made(other) for other in optimizers(trace) if other != optimizer)
    if made is not None and any(other is not None and other.stack == made.stack for other in others):
        return optimizer in cleared_in(trace)
    again = used_again(trace, optimizer)
    in_loop = again is not None and again[1]
    return in_loop or alike(optimizer) in cleared(story, trace.root) or cleared_elsewhere(trace, story, optimizer)


def _sets_gradients(trace: Trace, optimizer: Ref) -> bool:
    """Whether the program writes its own gradients over those that backward passes left."""
    return any(clip.kind == "set" and optimizer in clip.optimizers for clip in trace.of(Clip))


def cleared_elsewhere(trace: Trace, story: Story, optimizer: Ref) -> bool:
    """Whether the text around an optimizer's step clears its gradients on a path that was not taken."""
    step = next((s.place for s in trace.of(Step) if s.optimizer == optimizer and s.place is not None), None)
    taken = {e.place.line for t in story.traces for e in t.of(ZeroGrad) if e.place is not None}
    return step is not None and any(
        fact.detail == optimizer.name
        and fact.place.line not in taken
        and isinstance(around := fact.values["around"], Place)
        and around.line <= step.line <= around.end_line
        for fact in story.told("clearing")
    )


def whole(trace: Trace, ref: Ref | None) -> bool:
    """Whether everything that happens to an object was heard, so that an absence means something."""
    return ref is not None and not ref.escaped and not (trace.repeated and ref.given) and not _sets_gradients(trace, ref)


def into_window(trace: Trace, event: Event, optimizer: Ref, action: str = "move-into") -> FixRequest | None:
    """To do once a window, where the optimizer steps, what is done for every micro-batch."""
    step = next((s.place for s in trace.of(Step) if s.optimizer == optimizer), None)
    return FixRequest(action, event.place, other=step) if event.place is not None and step is not None else None


def trains_on(trace: Trace, loader: Ref) -> bool:
    """Whether a DDP model is trained with the batches of a loader."""
    inside = False
    for event in trace.events:
        if isinstance(event, EpochBegin):
            inside = event.loader == loader
        elif isinstance(event, EpochEnd):
            inside = inside and event.loader != loader
        elif isinstance(event, Backward) and inside and event.ddp:
            return True
    return False


__all__ = ["Turn", "accumulation", "call_site", "hear", "in_loader_loop", "optimizers", "same_turn", "whole", "windows"]
