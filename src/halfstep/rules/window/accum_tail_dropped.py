"""Rule HS203: accum-tail-dropped."""

from __future__ import annotations

import math
from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, EpochBegin, EpochEnd, Event, Fetch, Made, Place, Ref, RunEnd, Step, ZeroGrad
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import accumulation, alike, hear, optimizers, windows

CARD = Card(
    code="HS203",
    name="accum-tail-dropped",
    severity=Severity.WARNING,
    what="The micro-batches after the last full window never reach a step of their own.",
    why=("They are cleared at the next epoch's start, or leak into its first window. Step also on the last batch."),
    example="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            loss.backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Gradients that are pending when a pass over the loader has ended and the next thing starts."""
    if trace.exception is not None:
        return
    yield from _never_full(trace, story)
    for optimizer in optimizers(trace):
        yield from _never_used(trace, optimizer)
        yield from _left_over(trace, optimizer)
        way = accumulation(trace, optimizer)
        if way is None or not way.guarded or _carried(trace, optimizer):
            continue
        ended: EpochEnd | None = None
        followed = _followed(trace, optimizer)
        trained = {b.place for w in windows(trace, optimizer) if w.step is not None for b in w.backwards}
        for event, accounts in hear(trace):
            pending = [] if optimizer not in accounts or event.serial > followed else accounts[optimizer].pending
            if isinstance(event, EpochEnd) and pending and pending[-1].place in trained and _inside(pending[-1], event):
                ended = event
            elif isinstance(event, Step) and event.optimizer == optimizer:
                ended = None
            elif ended is not None and isinstance(event, (Fetch, RunEnd, ZeroGrad)) and (pending or way.wiped):
                if not (trace.repeated and isinstance(event, RunEnd) and optimizer.given and not _clears(trace, optimizer)):
                    yield Found(
                        _guard(trace, optimizer),
                        f"the last micro-batches of an epoch are left over: `{optimizer.name}` does not step at its end",
                        _fix(trace, ended, _guard(trace, optimizer)),
                    )
                ended = None


def _carried(trace: Trace, optimizer: Ref) -> bool:
    """Whether the count goes on over the epochs: what one leaves is completed to a whole window by the next."""
    stepped = [w for w in windows(trace, optimizer) if w.step is not None]
    return any(w.crossed for w in stepped) and len({w.size for w in stepped}) == 1


def _never_full(trace: Trace, story: Story) -> Iterator[Found]:
    """A window that is longer than an epoch, at whose start the gradients are cleared: no step is ever made."""
    stepped = {alike(o) for other in story.traces for o in optimizers(other)}
    for optimizer in dict.fromkeys(o for b in trace.of(Backward) for o in b.optimizers):
        parts = [part for part in windows(trace, optimizer) if part.backwards]
        if len(parts) < 2 or optimizer.escaped or optimizer.given or alike(optimizer) in stepped:
            continue
        last, longest = parts[-1].backwards[-1], max(part.size for part in parts)
        begun = next((b for b in reversed(list(trace.of(EpochBegin))) if b.serial < last.serial), None)
        known = begun is not None and longest in (begun.length, trace.fact(begun.loader, "length"))
        step = next((fact.place for fact in story.told("stepping") if fact.detail == optimizer.name), None)
        window = max((d.value or 0 for d in last.divisors), default=0)
        if known and window > longest and step is not None:
            yield Found(step, f"a window of {window:g} is longer than the epoch's {longest} micro-batches: there is no step")


def _followed(trace: Trace, optimizer: Ref) -> float:
    """When another optimizer took this one's place: the function that makes it was called again, with the same model."""
    made = (m for m in trace.of(Made) if m.what.kind == "optimizer" and m.what.name == optimizer.name)
    return min((m.serial for m in made if m.what.number > optimizer.number), default=math.inf)


def _never_used(trace: Trace, optimizer: Ref) -> Iterator[Found]:
    """Micro-batches fetched into a window that was never full: each time `k` are fetched and then used, but a rest never."""
    for begun in list(trace.of(EpochBegin))[:8]:
        fetched, used, sizes, ended = 0, 0, set[int](), False
        for event in trace.of(Fetch, Backward, EpochEnd):
            if event.serial < begun.serial or (isinstance(event, (Fetch, EpochEnd)) and event.loader != begun.loader):
                continue
            if isinstance(event, Fetch) and ended:
                break
            if not isinstance(event, Fetch):
                ended |= isinstance(event, EpochEnd)
                used += isinstance(event, Backward) and optimizer in event.optimizers
                continue
            if used:
                sizes.add(used if used == fetched else 0)
                fetched = used = 0
            fetched += 1
        if not used and len(sizes) == 1 and 1 <= fetched < max(sizes):
            yield Found(
                begun.place, f"the last {fetched} micro-batches of an epoch fill no window: they are fetched and never used"
            )
            return


def _left_over(trace: Trace, optimizer: Ref) -> Iterator[Found]:
    """Fewer than a window of what is taken one by one are left when the turns of the loop around are over."""
    full = [w for w in windows(trace, optimizer) if w.step is not None and w.backwards]
    loops = full[-1].backwards[-1].loops if len({w.size for w in full}) == 1 else ()
    for made in trace.of(Made) if len(loops) > 1 else ():
        left, counted = made.facts.get("left"), made.facts.get("counted")
        floored = any("floored" in turn.tags for turn in loops)
        if made.what.kind == "left over" and isinstance(left, int) and left < full[-1].size and (floored or not counted):
            yield Found(loops[-2].place, f"the last {left} micro-batches of an epoch fill no window: they are never used")
            return


def _inside(backward: Event, end: EpochEnd) -> bool:
    return len(backward.loops) > len(end.loops) and backward.loops[: len(end.loops)] == end.loops


def _clears(trace: Trace, optimizer: Ref) -> bool:
    return any(optimizer in e.optimizers for e in trace.of(ZeroGrad))


def _guard(trace: Trace, optimizer: Ref) -> Place | None:
    return next((s.place for s in trace.of(Step) if s.optimizer == optimizer), None)


def _fix(trace: Trace, ended: EpochEnd, step: Place | None) -> FixRequest | None:
    sized = not trace.fact(ended.loader, "iterable")
    return FixRequest("step-at-end", step) if step is not None and sized else None
